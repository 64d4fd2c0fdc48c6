"""Two CSV files and questions with their answers, without any SQL: from the doctor to a trained policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlenv import cli
from tests.integration.training import surroundings_in
from trainer.eval.run_files import RunFolder
from trainer.tiny import BASE_CHECKPOINT

CITIES = ("Oslo", "Lima", "Rome", "Bern")
PEOPLE = [(number, f"person{number}", CITIES[number % 4]) for number in range(1, 13)]
QUESTIONS = [
    *((f"How many people live in {city}?", 3) for city in CITIES),
    *((f"Where does {name} live?", city) for _, name, city in PEOPLE),
    *((f"Who lives in {city}?", [name for _, name, there in PEOPLE if there == city]) for city in CITIES),
    ("What is the average price?", 2.33),
]


@pytest.fixture
def shop(generated_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "shop"
    folder.mkdir()
    rows = "".join(f"{number},{name},{city}\n" for number, name, city in PEOPLE)
    (folder / "people.csv").write_text(f"id,name,city\n{rows}", encoding="utf-8")
    (folder / "prices.csv").write_text("price_id,price\n1,2\n2,3\n3,2\n", encoding="utf-8")
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with surroundings_in(generated_cache):
        yield folder


def test_from_the_doctor_to_a_policy(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "doctor", "shop"]) == 0
    for command in (["evaluate", "--policy", "oracle"], ["warmup", "--model_name_or_path", str(BASE_CHECKPOINT)]):
        assert cli.main([*command, "--data", "shop"]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith("give their SQL, or leave it out")
    flags = [
        "--config",
        str(BASE_CHECKPOINT.parents[2] / "configs" / "tiny.yaml"),
        "--data",
        "shop",
        "--max_steps",
        "1",
    ]
    flags += ["--model_name_or_path", str(BASE_CHECKPOINT), "--output_dir", "run", "--advantages", "turn"]
    flags += ["--guided_starts", "true", "--save_strategy", "steps", "--save_steps", "1"]
    assert cli.main(["train", *flags]) == 0
    run = RunFolder.open(Path("run"))
    assert [each.label for each in run.evaluations()] == ["random", "before", "after"]
    played = run.evaluation_episodes("after")
    assert len(played) == len(QUESTIONS) // 4
    assert {record.hardness for record in played} == {"unknown"}
    assert (run.path / "report.html").is_file()
    ways = json.loads((run.path / "checkpoint-1" / "guided_starts.json").read_bytes())["state"]["ways"]
    right = [each.record for each in run.episodes() if each.record.outcome == "correct"]
    asked = {r.question_id for r in right if any(t["action_type"] == "QUERY" and not t["error"] for t in r.turns)}
    assert ways.keys() == asked, "without SQL, its own ways are what can be given"
