"""A small database and its questions, shared by the tests."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from env_server.dataset import Dataset, Gold, Hardness, Question, Row, Split
from env_server.environment import SQLEnvironment
from env_server.settings import EnvSettings
from env_server.sql.pool import DatabasePool
from tests.fork_server import end_with_parent

if "PYTEST_XDIST_WORKER" in os.environ:
    # One whose test does not end would go on after the process that has started it, and so would its servers.
    end_with_parent(os.getppid(), signal.SIGKILL)

# No test needs the Hub: names that are no folders are looked for in the cache alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests run beside each other, one a core: torch's threads would spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes says nothing on a machine that others use as well.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

    from tests.fork_server import ForkServer

TESTS = Path(__file__).parent
LONGEST = (
    "integration/test_real_model.py",
    "integration/test_real_model_exactness.py",
    "notebooks/test_train_grpo.py",
    "integration/test_stages.py",
    "integration/test_vllm_training.py",
    "integration/test_vllm_faults.py",
    "integration/test_weight_sync.py",
    "integration/test_launcher.py",
    "integration/test_ranks.py",
    "integration/test_lost_node.py",
    "integration/test_staleness.py",
    "integration/test_vllm_adapters.py",
    "integration/test_soak.py",
    "docs/test_extending.py",
)
"""Files that take half a minute and more, the longest first."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that at the end no process is left alone with one."""
    longest = {TESTS / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: longest.get(item.path, len(longest)))


PETS = """
CREATE TABLE owners (owner_id INTEGER PRIMARY KEY, name TEXT, city TEXT);
CREATE TABLE pets (
    pet_id INTEGER PRIMARY KEY, name TEXT, species TEXT, age INTEGER, weight REAL,
    owner_id INTEGER REFERENCES owners(owner_id));
INSERT INTO owners VALUES (1, 'Ada', 'Oslo'), (2, 'Bo', 'Lima'), (3, 'Cy', 'Oslo');
INSERT INTO pets VALUES
    (1, 'Rex', 'dog', 3, 12.5, 1), (2, 'Tom', 'cat', 5, 4.25, 2), (3, 'Kit', 'cat', 1, 3.0, 1),
    (4, 'Max', 'dog', 7, NULL, 3), (5, 'Zoe', 'owl', 2, 0.75, NULL);
"""

GOLDS: list[tuple[str, str, str, tuple[Row, ...], bool]] = [
    ("cats", "How many cats are there?", "SELECT COUNT(*) FROM pets WHERE species = 'cat'", ((2,),), False),
    ("oldest", "What is the oldest pet's name?", "SELECT name FROM pets ORDER BY age DESC LIMIT 1", (("Max",),), True),
    (
        "oslo",
        "Name the pets of owners in Oslo.",
        "SELECT T1.name FROM pets AS T1 JOIN owners AS T2 ON T1.owner_id = T2.owner_id WHERE T2.city = 'Oslo'",
        (("Rex",), ("Kit",), ("Max",)),
        False,
    ),
    (
        "species",
        "How many pets of each species are there?",
        "SELECT species, COUNT(*) FROM pets GROUP BY species",
        (("cat", 2), ("dog", 2), ("owl", 1)),
        False,
    ),
]


@pytest.fixture(scope="session")
def pets_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pets") / "pets.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(PETS)
    connection.close()
    return path


@pytest.fixture(scope="session")
def pets(pets_file: Path) -> Dataset:
    questions = tuple(
        Question(
            question_id=question_id,
            text=text,
            db_id="pets",
            gold_sql=sql,
            hardness=Hardness.EASY,
            split=Split.EVAL if question_id == "species" else Split.TRAIN,
            gold=Gold(rows, ordered),
            family="test",
        )
        for question_id, text, sql, rows, ordered in GOLDS
    )
    return Dataset("pets", questions, {"pets": pets_file})


@pytest.fixture(scope="session")
def pets_pool(pets: Dataset) -> Iterator[DatabasePool]:
    with closing(DatabasePool(pets.databases, EnvSettings().sandbox)) as pool:
        yield pool


@pytest.fixture
def environment(pets: Dataset, pets_pool: DatabasePool) -> SQLEnvironment:
    return SQLEnvironment(pets, pets_pool)


@pytest.fixture(scope="session")
def random_policy() -> Callable[..., Qwen3ForCausalLM]:
    """Makes a random Qwen3 of two layers for a tokenizer: `random_policy(tokenizer, seed, context, liked)`.

    `liked` maps tokens to a bias on their logits: a policy that likes actions plays episodes that differ in kind.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    def make(
        tokenizer: PreTrainedTokenizerBase, seed: int = 0, context: int = 512, liked: Mapping[str, float] | None = None
    ) -> Qwen3ForCausalLM:
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=context,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(config)
        with torch.no_grad():
            for text, bias in (liked or {}).items():
                # The first hidden dimension is made a constant, so that its column of the head is a bias.
                model.model.embed_tokens.weight[:, 0] = 1.0
                (index,) = tokenizer(text, add_special_tokens=False)["input_ids"]
                model.lm_head.weight[index, 0] = bias / config.hidden_size**0.5
        return model.eval()

    return make


@pytest.fixture(scope="session")
def generated_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where generated data sets are kept for the tests of all workers; none is ever half there."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "generated"


@pytest.fixture(scope="session")
def spider_dir() -> Path:
    """The real Spider folder, where SQLENV_SPIDER_DIR names one."""
    folder = os.environ.get("SQLENV_SPIDER_DIR")
    if not folder:
        pytest.skip("SQLENV_SPIDER_DIR is not set")
    return Path(folder)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks processes that train: what they import takes each of them more than six seconds of a core."""
    from tests.fork_server import ForkServer

    preload = ["torch.distributed.launcher.api", "trainer.train", "trainer.warmup"]
    # Arrow's allocator would keep a thread.
    single = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
    environment = {**os.environ, **single, "PYTHONPATH": str(TESTS.parent)}
    log = tmp_path_factory.mktemp("forks") / "training.log"
    with closing(ForkServer(sys.executable, preload, environment, log)) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Forks vLLM's servers; see tests/integration/vllm_server.py."""
    from tests.integration.vllm_server import fork_vllm

    with closing(fork_vllm(tmp_path_factory.mktemp("forks") / "vllm.log")) as server:
        yield server
