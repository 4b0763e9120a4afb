"""What every model of a request's fields has in common. Knows no field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown fields are errors, and types are not bent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
