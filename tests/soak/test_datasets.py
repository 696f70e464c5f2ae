"""Folders that the `datasets` library writes hold the documents that it reads from them, one by one."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_tables import documents_of

TEXTS = [f"document {i} \u2028 é" * (i % 50 + 1) if i % 9 else None for i in range(3000)]


def texts_of(rows: Any) -> list[str]:
    """What `datasets` yields, without the rows that have no text."""
    return [row["text"] for row in rows if row["text"]]


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # of the libraries that it imports
def test_saved_and_published_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved in shards, shuffled, mapped on disk, as splits, and as Parquet: the same documents in the same order."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    whole = datasets.Dataset.from_dict({"id": list(range(len(TEXTS))), "text": TEXTS})
    some = whole.shuffle(seed=3).select(range(700))

    whole.save_to_disk(tmp_path / "whole", num_shards=3)
    loaded = datasets.load_from_disk(tmp_path / "whole")
    loaded.map(lambda row: {"text": f"mapped {row['id']}"})
    assert list((tmp_path / "whole").glob("cache-*.arrow")), (
        "map leaves its cache beside the shards"
    )
    assert documents_of(tmp_path / "whole") == texts_of(loaded) == [text for text in TEXTS if text]

    some.save_to_disk(tmp_path / "some")
    assert documents_of(tmp_path / "some") == texts_of(datasets.load_from_disk(tmp_path / "some"))
    assert documents_of(tmp_path / "some") != texts_of(whole.select(range(700)))

    datasets.DatasetDict(train=whole, test=some).save_to_disk(tmp_path / "both")
    both = datasets.load_from_disk(tmp_path / "both")
    for split in ("train", "test"):
        assert documents_of(tmp_path / "both" / split) == texts_of(both[split])

    (tmp_path / "hub" / "data").mkdir(parents=True)
    for shard in range(3):
        rows = whole.shard(num_shards=3, index=shard, contiguous=True)
        rows.to_parquet(
            tmp_path / "hub" / "data" / f"train-{shard:05}-of-00003.parquet", batch_size=100
        )
    published = datasets.load_dataset("parquet", data_dir=str(tmp_path / "hub"), split="train")
    assert documents_of(tmp_path / "hub") == texts_of(published) == texts_of(whole)

    whole.to_json(tmp_path / "lines.jsonl", force_ascii=False)
    assert documents_of(tmp_path / "lines.jsonl") == texts_of(whole)
