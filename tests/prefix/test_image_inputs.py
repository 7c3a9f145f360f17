"""Which inputs stand beside tokens, and which of them are left when the first images are known."""

import numpy as np
import pytest
import torch

from hf_paged_cache.prefix.extra_keys import spans_of
from hf_paged_cache.prefix.image_inputs import inputs_after, inputs_beside_tokens
from hf_paged_cache.prefix.prompts import Prompts

IMAGE, VIDEO = 5, 6
ROW = [1, IMAGE, IMAGE, 2, IMAGE, IMAGE, 3, IMAGE, 4]


def prompts(*rows: list[int]) -> Prompts:
    width = max(map(len, rows))
    padding = np.array([width - len(row) for row in rows], dtype=np.int32)
    tokens = [np.array(row) for row in rows]
    spans = [
        spans_of(row, [f"{number}" for number in range(count)], [IMAGE, VIDEO], names_whole=False)
        for row in tokens
        for count in [len(spans_of(row, None, [IMAGE, VIDEO], names_whole=False))]
    ]
    return Prompts(tokens, padding, width, "", spans)


def left(num_columns: int, about: Prompts, **images: torch.Tensor) -> dict[str, list] | None:
    found = inputs_after(num_columns, about, [*images], {**images, "use_cache": True})
    return found if found is None else {name: value.tolist() for name, value in found.items() if name != "use_cache"}


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("pixel_values", torch.zeros(1), "images"),
        ("input_features", [torch.zeros(1)], "images"),
        ("image_grid_thw", np.zeros(3), "images"),
        ("mm_encoder_outputs", {"image": torch.zeros(1)}, "images"),
        ("inputs_embeds", torch.zeros(1), "others"),
        ("position_ids", torch.zeros(1, 3), "others"),
        ("adapter_names", ["a"], "others"),
        ("adapter_names", None, None),
        ("token_type_ids", torch.tensor([[0, 0, 0]]), None),
        ("token_type_ids", torch.tensor([[0, 1, 0]]), None),
        ("mm_token_type_ids", torch.tensor([[0, 1, 1]]), "others"),
        ("negative_prompt_ids", torch.zeros(1, 2), None),
        ("something_new", torch.zeros(1), "others"),
        ("max_new_tokens", 3, None),
    ],
)
def test_what_stands_beside_tokens(name, value, kind) -> None:
    beside = inputs_beside_tokens({name: value}, torch.tensor([[1, IMAGE, 2]]), [IMAGE])
    assert beside._asdict() == {"images": [], "others": []} | ({kind: [name]} if kind else {})


def test_inputs_with_a_part_for_each_image() -> None:
    pixels, sizes = torch.arange(3.0), torch.arange(6).view(3, 2)
    for num_columns, expected in ((0, [0, 1, 2]), (1, [0, 1, 2]), (3, [1, 2]), (4, [1, 2]), (6, [2])):
        found = left(num_columns, prompts(ROW), pixel_values=pixels, image_sizes=sizes)
        assert found == {"pixel_values": expected, "image_sizes": sizes[expected].tolist()}
    assert left(8, prompts(ROW), pixel_values=pixels, image_sizes=sizes) == {}


def test_patches_that_a_grid_counts() -> None:
    grid = torch.tensor([[1, 2, 1], [1, 1, 1], [1, 2, 2]])
    patches = torch.arange(7)
    for num_columns, first in ((3, 2), (6, 3)):
        found = left(num_columns, prompts(ROW), pixel_values=patches, image_grid_thw=grid)
        assert found["pixel_values"] == patches[first:].tolist()
    rows = prompts([1, IMAGE, 2, IMAGE, 3], [IMAGE, 3])  # all are in one array, row by row
    found = left(3, rows, pixel_values=patches, image_grid_thw=grid)
    assert found == {"pixel_values": [2, 3, 4, 5, 6], "image_grid_thw": grid[1:].tolist()}
    assert left(4, rows, pixel_values=patches, image_grid_thw=grid) == {}


@pytest.mark.parametrize(
    ("rows", "images"),
    [
        ([ROW], {"pixel_values": torch.zeros(1, 3, 8)}),  # images in a dimension of a row
        ([ROW], {"pixel_values": torch.zeros(7)}),  # patches that nobody counts
        ([ROW], {"pixel_values": torch.zeros(3), "pixel_mask": torch.zeros(2)}),
        ([ROW], {"pixel_values": torch.zeros(7), "image_grid_thw": torch.ones(2, 3, dtype=torch.long)}),
        ([ROW], {"pixel_values": [torch.zeros(1)] * 3}),
        ([ROW, ROW], {"pixel_values": torch.zeros(6)}),
        ([[*ROW, VIDEO, 1]], {"pixel_values": torch.zeros(3), "pixel_values_videos": torch.zeros(1)}),
    ],
)
def test_what_cannot_be_divided_for_certain_is_not(rows, images) -> None:
    about = prompts(*rows)
    assert left(3, about, **images) is None
    assert left(about.num_columns - 1, about, **images) == {}
    assert inputs_after(1, about, [*images], images) == images
