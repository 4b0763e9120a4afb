"""The KV memory of a target. Knows no sequence and not which pages are in use."""

from __future__ import annotations

import torch
from torch import Tensor


class KVPool:
    """K and V of all layers in pages. Zero at first: a masked-out slot is multiplied by 0 and must not hold NaN."""

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(
                f"a KV pool needs at least one page of at least one token, got {pages} pages of {page_size}"
            )
        self.pages = pages
        self.page_size = page_size
        shape = (layers, pages, page_size, kv_heads, head_dim)
        self.k: Tensor = torch.zeros(shape, dtype=dtype, device=device)  # [layers, pages, page, Hkv, D]
        self.v: Tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.kv_bytes_per_token: int = 2 * layers * kv_heads * head_dim * self.k.element_size()

    @property
    def bytes(self) -> int:
        return self.kv_bytes_per_token * self.page_size * self.pages

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows k, v `[T, Hkv, D]` at `slots [T] int64` (page * page_size + offset) of one layer."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.v[layer].flatten(0, 1).index_copy_(0, slots, v)
