"""Agents with a data set of the hub, or of Arrow files."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class HFDatasetAgent(BaseModel, extra="allow"):
    """Has its rows in `dataset`; `split` is one of its arguments."""

    dataset_file: str | None = None  # folder of Arrow files
    hf_dataset_name: str | None = None  # of the hub, where there is no such folder
    split: str | None = None

    def __init__(self, **data: Any) -> None:
        super().__init__(**data)
        self.dataset = self.load_hf_dataset()

    def load_hf_dataset(self) -> Any:
        """The rows. Raises ValueError where neither is given, and what the datasets library does."""
        import datasets

        if self.dataset_file:
            return datasets.load_dataset("arrow", data_dir=self.dataset_file, split=self.split)
        if not self.hf_dataset_name:
            raise ValueError("hf_dataset_name: nothing is not allowed; allowed: a hub name, or dataset_file")
        return datasets.load_dataset(self.hf_dataset_name, split=self.split)
