"""Spider's folder, as the release of Yu et al. (EMNLP 2018) unpacks, and the ways in which it has been rearranged.

    train_spider.json, train_others.json, dev.json     any of them; a list of {"db_id", "question", "query"}
    database/ID/ID.sqlite                              one file for each db_id

The release with the test set holds test.json and test_database/ as well; test.json is read where there is no dev.json.
All of it may lie in a top folder, such as spider/ or spider_data/. The databases may be `.db` files, lie directly in
their folder, and the folder may be called databases/. Other keys of a question, and other files, are ignored.
How a folder is read, what a question is called and how the split is made: `env_server.data.layout`.
"""

from __future__ import annotations

from pathlib import Path

from env_server.data.layout import Layout, read_layout
from env_server.data.raw import RawDataset

SPIDER = Layout(
    name="spider",
    train_files=("train_spider.json", "train_others.json"),
    eval_files=("dev.json", "test.json"),
    database_folders=("database", "databases", "test_database"),
    sql_key="query",
)


def read_spider(folder: Path) -> RawDataset:
    """Read a Spider folder. Raises DataError."""
    return read_layout(SPIDER, folder)
