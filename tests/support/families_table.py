"""Prints docs/families.md, after the sweep of some minutes.

`python -m tests.support.families_table > docs/families.md`
"""

from __future__ import annotations

from tests.support.families import ATTENTIONS, FAMILIES, Family, Refusal
from tests.support.generate_modes import MODES
from tests.sweep.table import sweep_page

INTRODUCTION = """\
# Families and modes

What the tests compare with transformers' own `DynamicCache`, on tiny random models of each family in fp32, for a single
row and, where transformers takes one, for a left-padded batch: tokens must be the same, scores the same to 1e-4. A
number stands where transformers itself cannot do something with its own cache; its reason is below the table. A number
beside a ✓ holds for some releases only, or is a remark.

Every mode also runs on two real models, SmolLM2-135M-Instruct (Llama) and Gemma 3 270M, with a prompt longer than
Gemma's window: `tests/models/test_real_models.py`.

This page is printed by `python -m tests.support.families_table`.
"""


def page() -> str:
    """The whole page, in Markdown."""
    notes: list[Refusal] = []
    columns = [mode.name for mode in MODES] + [f"`{attention}`" for attention in ATTENTIONS]
    rows = [["family", "what it brings", *columns], ["---", "---", *[":-:"] * len(columns)]]
    for family in FAMILIES:
        cells = [cell(family, column.strip("`"), notes) for column in columns]
        rows.append([family.name, family.feature, *cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    reasons = "\n".join(f"{number}. {described(note)}" for number, note in enumerate(notes, start=1))
    return f"{INTRODUCTION}\n{table}\n\n{reasons}\n"


def cell(family: Family, mode_or_attention: str, notes: list[Refusal]) -> str:
    """One cell of the table; a reason that is not in `notes` yet is added to them."""
    remark = family.remarks.get(mode_or_attention)
    if remark is not None:
        return f"✓ {_number(Refusal(remark), notes)}"
    refusal = family.refused.get(mode_or_attention)
    if refusal is None:
        return "✓"
    number = _number(refusal, notes)
    return number if refusal.releases == Refusal.releases else f"✓ {number}"


def _number(note: Refusal, notes: list[Refusal]) -> str:
    if note not in notes:
        notes.append(note)
    return str(notes.index(note) + 1)


def described(note: Refusal) -> str:
    if note.releases == Refusal.releases:
        return note.reason
    return f"transformers {note.releases}: {note.reason}"


if __name__ == "__main__":
    print(f"{page()}\n{sweep_page()}", end="")
