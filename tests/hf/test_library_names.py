"""What the package looks for inside transformers is there, and its absence is said."""

from __future__ import annotations

import logging

import pytest
from transformers import masking_utils

from hf_paged_cache.hf import library_names


@pytest.mark.parametrize("name", library_names.library_names(), ids=lambda name: name.name)
def test_the_installed_transformers_has_it(name: library_names.LibraryName) -> None:
    assert name.is_there


def test_nothing_is_logged_while_all_are_there(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        library_names.report_missing()
    assert not caplog.records


def without_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, library_names.MASK_ARGUMENTS)


def without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, library_names.MASK_ARGUMENTS, lambda config, mask: None)


@pytest.mark.parametrize("change", [without_the_function, without_the_variable])
def test_one_line_says_what_is_lost(
    change: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change(monkeypatch)
    with caplog.at_level(logging.WARNING):
        library_names.report_missing()
    (record,) = caplog.records
    assert "_preprocess_mask_arguments" in record.getMessage()
    assert "padding is stored like text" in record.getMessage()
