"""`eval.card`: stages that are cut into pieces, end in time, and go on in the next run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from eval.card import command, kernels, report, tests, worker
from eval.card.journal import JournalError, StageJournal
from eval.card.settings import ON_A_CARD
from eval.card.stages import STAGES
from eval.card.supervisor import run_stage
from eval.card.worker import work
from hf_paged_cache import CODECS
from tests.eval.card_pieces import make

SETUP = {"device": "a card", "is_dry_run": False}
MACHINE = {
    "device": "a card",
    "device_memory": 2**36,
    "multiprocessors": 108,
    "driver": "570.1",
    "toolkit": "CUDA 13",
    "triton": "3.9.0",
    "processor": "a processor",
    "cores": 2,
    "threads": 2,
    "python": "3.12",
    "torch": "2.13",
    "transformers": "5.24",
    "hf_paged_cache": "0.2",
}


@pytest.fixture
def journal(tmp_path: Path) -> StageJournal:
    return StageJournal(tmp_path, "tests", SETUP)


def soon() -> float:
    return time.monotonic() + 60


def outcomes(journal: StageJournal) -> dict[str, str | None]:
    """By piece, why it came to nothing."""
    return {name: piece.get("reason") for name, piece in journal.pieces.items()}


def test_a_piece_that_fails_leaves_the_others_alone(journal, tmp_path):
    assert work(make, ["succeeds", "raises", "succeeds again"], journal, soon()) == 0
    again = StageJournal(tmp_path, "tests", SETUP)
    assert again.is_complete
    assert outcomes(again) == {
        "succeeds": None,
        "raises": "ValueError: no kernel in somewhere",
        "succeeds again": None,
    }


def test_the_next_run_measures_what_is_left(journal, monkeypatch):
    names = ["succeeds", "succeeds again"]
    work(make, names, journal, time.monotonic() - 1)
    assert (journal.planned, journal.pieces, journal.is_complete) == (names, {}, False)
    work(make, names[:1], journal, soon())
    first = journal.pieces["succeeds"]
    work(make, names, journal, soon())
    assert journal.is_complete
    assert journal.pieces["succeeds"] is first


def test_no_piece_begins_that_would_not_end_in_time(journal, monkeypatch):
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr(worker.time, "monotonic", lambda: next(now))
    # A piece takes 10 s or 20 s by this clock, which goes on by 10 s each time that it is read.
    work(make, [f"succeeds {number}" for number in range(9)], journal, deadline=100)
    assert 1 <= len(journal.pieces) < 9
    assert journal.under_way is None


def test_a_stage_that_cannot_begin_is_told_and_tried_again(journal):
    work(make, ["nonsense"], journal, soon())
    assert journal.error == "KeyError: 'nonsense'"
    assert report.Progress.of(journal).state == "cannot begin"
    work(make, ["succeeds"], journal, soon())
    assert (journal.error, journal.is_complete) == (None, True)


def test_a_lost_device_ends_the_process(journal, monkeypatch):
    monkeypatch.setattr(worker, "_device_works", lambda: False)
    assert work(make, ["raises", "succeeds"], journal, soon()) == worker.DEVICE_LOST
    assert [*journal.pieces] == ["raises"]


def test_a_process_that_dies_is_followed_by_another_one(journal):
    run_stage(make, ["succeeds", "dies", "succeeds again"], journal, 120)
    assert outcomes(journal) == {"succeeds": None, "dies": "its process ended by SIGKILL", "succeeds again": None}


def test_a_stage_without_time_ends_at_once(journal):
    journal.begin("hangs")
    start = time.monotonic()
    run_stage(make, ["hangs", "succeeds"], journal, 0)
    assert time.monotonic() - start < 30
    assert outcomes(journal) == {"hangs": "its process ended"}
    assert not journal.is_complete


@pytest.mark.slow
def test_a_piece_that_hangs_is_given_up_when_time_is_up(journal):
    run_stage(make, ["succeeds", "hangs", "succeeds again"], journal, 30)
    assert outcomes(journal) == {"succeeds": None, "hangs": "took longer than the 30 s of a stage"}
    run_stage(make, ["succeeds", "hangs", "succeeds again"], journal, 120)
    assert journal.is_complete


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tests.json is no file of the stage tests: remove it"),
        ('{"stage": "formats"}', "tests.json is no file of the stage tests: remove it"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    (tmp_path / "tests.json").write_text(content)
    with pytest.raises(JournalError, match=message):
        StageJournal(tmp_path, "tests", SETUP)


def test_results_of_another_card_are_not_continued(journal, tmp_path):
    journal.plan([])
    with pytest.raises(JournalError, match=r"device 'a card', now 'another card'\): choose another --out"):
        StageJournal(tmp_path, "tests", SETUP | {"device": "another card"})


def test_the_report_names_the_card_and_what_went_wrong(tmp_path):
    journals = {name: StageJournal(tmp_path, name, SETUP) for name in ("tests", "correctness", "tuning")}
    work(make, ["succeeds", "raises"], journals["tests"], soon())
    wrong = {"section": "correctness", "heads": "4:2:16", "dtype": "float32", "kv": "int8", "call": "decode"}
    journals["correctness"].plan(["int8", "int4"])
    journals["correctness"].finish(
        "int8", 1.0, [wrong | {"error": None, "verdict": "WRONG: off by 3"}], [], ["off by 3"]
    )
    text = report.markdown(MACHINE, journals)
    assert text.startswith("# a card\n")
    assert "Triton 3.9.0, CUDA 13, driver 570.1, 64 GiB, 108 multiprocessors." in text
    assert "- raises: ValueError: no kernel in somewhere" in text
    assert "WRONG: off by 3" in text
    states = {line.split()[1]: line.split()[3] for line in text.splitlines() if line.startswith("| t")}
    assert states == {"tests": "done", "tuning": "not"}
    assert report.Progress.of(journals["correctness"]) == report.Progress("unfinished", 1, 0, 1, 1, 1.0)
    assert "dry run" not in text


def test_every_format_and_every_test_file_takes_part():
    assert {*ON_A_CARD.formats} == {*CODECS}
    assert all((tests.REPOSITORY / path).is_file() for path in ON_A_CARD.tests)
    checked = kernels.correctness(ON_A_CARD)
    assert len(checked) == len(CODECS) * len(ON_A_CARD.dtypes) * len(ON_A_CARD.heads)


def test_failed_tests_are_named(tmp_path, monkeypatch):
    file = tmp_path / "test_one.py"
    file.write_text("def test_good():\n    pass\n\ndef test_bad():\n    assert 1 == 2, 'sums'\n")
    monkeypatch.setattr(tests, "REPOSITORY", tmp_path)
    monkeypatch.setattr(tests, "MAX_PROCESSES", 1)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than the tests take
    measured = tests._run("test_one.py")
    (row,) = measured.rows
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 1, 0)
    (fault,) = measured.faults
    assert fault.startswith("test_one.py, test_bad: AssertionError: sums")
    with pytest.raises(RuntimeError, match="pytest ended with status 4: "):
        tests._run("no_such_file.py")


def test_a_dry_run_of_one_stage(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = ["--out", str(tmp_path), "--dry-run", "--stage", "uploads"]
    assert command.main(options) == 0
    content = json.loads((tmp_path / "uploads.json").read_text())
    rows = [row for piece in content["pieces"].values() for row in piece["rows"]]
    assert {row["section"] for row in rows} == {"metadata", "copies"}
    assert content["setup"]["torch"] == torch.__version__
    assert "A dry run on the CPU" in (tmp_path / "report.md").read_text()

    monkeypatch.setattr(command, "run_stage", lambda *_: pytest.fail("what is there is measured again"))
    capsys.readouterr()
    assert command.main(options) == 0
    journal = StageJournal(tmp_path, "uploads", content["setup"])
    journal.finish("waits", 0.0, [], [], ["it waits"])
    assert command.main(options) == 1
    assert command.main([*options, "--list"]) == 0
    listed = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert (listed["uploads"], listed["tuning"]) == ("done", "not")


@pytest.mark.slow
def test_a_dry_run_of_all_stages(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert command.main(["--out", str(tmp_path), "--dry-run"]) == 0
    for name in STAGES:
        content = json.loads((tmp_path / f"{name}.json").read_text())
        assert {*content["planned"]} == {*content["pieces"]}, name
        assert all("reason" not in piece for piece in content["pieces"].values()), name
    text = (tmp_path / "report.md").read_text()
    measured = {"tests", "correctness", "attention", "launch", "decode", "beam", "padding", "codecs"}
    for section in measured | {"metadata", "copies", "tuning"}:
        assert f"### {report.SECTIONS[section].title}\n" in text
    assert str(tmp_path) not in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_there_is_the_dry_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--out", str(tmp_path / "card")])
    assert stop.value.code == 2
    assert "there is no card: --dry-run shows on the CPU that everything runs" in capsys.readouterr().err
    assert not (tmp_path / "card").exists()


def test_a_folder_of_another_card_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    StageJournal(tmp_path, "tests", SETUP).plan([])
    with pytest.raises(SystemExit) as stop:
        command.main(["--out", str(tmp_path), "--dry-run"])
    assert stop.value.code == 2
    assert "choose another --out" in capsys.readouterr().err
