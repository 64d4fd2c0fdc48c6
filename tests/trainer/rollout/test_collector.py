"""The garbage collector while episodes are played: set apart, and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from trainer.rollout.client import GC_THRESHOLDS, rare_collections


def test_it_is_as_before_afterwards_whatever_happens() -> None:
    def fail() -> None:
        with rare_collections():
            assert gc.get_threshold() == GC_THRESHOLDS != before
            assert gc.get_freeze_count() > 0
            raise KeyError

    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fail()
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_what_is_thrown_away_meanwhile_is_found_afterwards() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    with rare_collections():
        Cycle()
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Cycle]


def test_blocks_that_overlap_leave_what_was_there_before() -> None:
    before = gc.get_threshold()
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == GC_THRESHOLDS
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
