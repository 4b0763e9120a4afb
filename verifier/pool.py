"""The KV memory of a target. Knows no sequence and not which pages are in use."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels import kv_compact
from ddtree.verifier.batch import Commit


class Pool:
    """Cache tensors of all layers in pages. Zero at first: a masked-out slot is multiplied by 0 and must not hold NaN."""

    def __init__(
        self,
        caches: int,
        row: tuple[int, ...],  # shape of one slot's row in each of them
        *,
        layers: int,
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
        self._all: Tensor = torch.zeros((caches, layers, pages, page_size, *row), dtype=dtype, device=device)
        self.caches: tuple[Tensor, ...] = (
            self._all.unbind()
        )  # [layers, pages, page, …] each, as `kv_compact` takes them
        self.device = self._all.device
        self.kv_bytes_per_token: int = self._all[:, :, 0, 0].numel() * self._all.element_size()

    def layer(self, i: int) -> Tensor:
        """[caches, pages, page, …] of one layer."""
        return self._all[:, i]

    def commit(self, paths: Commit) -> None:
        """Move the rows of accepted paths to where plain decoding would have put them, in every layer."""
        kv_compact(self.caches, paths.page_table, self.page_size, paths.seq_len, paths.path, paths.n_accepted)

    @property
    def bytes(self) -> int:
        return self.kv_bytes_per_token * self.page_size * self.pages


class KVPool(Pool):
    """K and V of every KV head."""

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
        row = kv_heads, head_dim
        super().__init__(2, row, layers=layers, pages=pages, page_size=page_size, dtype=dtype, device=device)
        self.k: Tensor  # [layers, pages, page, Hkv, D]
        self.v: Tensor
        self.k, self.v = self.caches

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Put rows k, v `[T, Hkv, D]` at `slots [T] int64` (page * page_size + offset) of one layer."""
        put_rows(self.k[layer], slots, k)
        put_rows(self.v[layer], slots, v)


class LatentPool(Pool):
    """Multi-head latent attention: one row per slot that all heads share, the latent and then its rotary part."""

    def __init__(
        self, *, layers: int, width: int, pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__(1, (width,), layers=layers, pages=pages, page_size=page_size, dtype=dtype, device=device)
        [self.rows] = self.caches  # [layers, pages, page, width]


def put_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put `rows [T, …]` at `slots [T] int64` of one layer's `cache [pages, page, …]`."""
    cache.flatten(0, 1).index_copy_(0, slots, rows)
