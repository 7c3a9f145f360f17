"""Prompts with images: what a store serves of them is what the model would have computed, under the keys of the images.

The answers of a model without any reuse, with transformers' own cache, are what is expected.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import BlockStore, InvalidArgumentError
from hf_paged_cache.prefill import CACHE_ARGUMENT
from tests.support.families import family_called
from tests.support.family_configs import (
    FIRST_WORD,
    IMAGE,
    IMAGE_END,
    IMAGE_START,
    TEXT,
    UNTIED,
    VIDEO,
    VOCABULARY,
    rope,
)
from tests.support.stores import SIZE, check_unheld, make_store

NUM_TOKENS = {"LLaVA": 4, "Gemma 3 with images": 4}  # of an image; 6 under rotary positions in three axes
PIXELS = {"LLaVA": (1, 3, 8, 8), "Gemma 3 with images": (1, 3, 16, 16)}
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


def text(length: int, seed: int) -> list[int]:
    return torch.randint(FIRST_WORD, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def qwen2_5_vl() -> hf.Qwen2_5_VLConfig:
    return hf.Qwen2_5_VLConfig(
        **UNTIED,
        **QWEN_TOKENS,
        text_config={**TEXT, "rope_parameters": rope(mrope_section=[1, 1, 2])},
        vision_config={**QWEN_TOWER, "fullatt_block_indexes": [0], "window_size": 16},
    )


def qwen3_vl() -> hf.Qwen3VLConfig:
    rotary = rope(mrope_section=[4, 2, 2], mrope_interleaved=True)
    return hf.Qwen3VLConfig(
        **UNTIED,
        **QWEN_TOKENS,
        text_config={**TEXT, "head_dim": 16, "rope_parameters": rotary},
        vision_config={**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    )


def glm_4v() -> hf.Glm4vConfig:
    return hf.Glm4vConfig(
        **UNTIED,
        text_config={**TEXT, "rope_parameters": rope(mrope_section=[1, 1, 2])},
        vision_config={**QWEN_TOWER, "image_size": 32},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=IMAGE_START,
        image_end_token_id=IMAGE_END,
    )


QWEN_TOWER = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "intermediate_size": 32,
    "out_hidden_size": 32,
}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": IMAGE_START,
    "vision_end_token_id": IMAGE_END,
}
SIBLINGS = {"Qwen2.5-VL": qwen2_5_vl, "Qwen3-VL": qwen3_vl, "GLM-4V": glm_4v}


def build(family: str) -> PreTrainedModel:
    like = family_called("Qwen2-VL" if family in SIBLINGS else family)
    return like.build_from(SIBLINGS.get(family, like.config)(), "hf_paged")


class Chat:
    """A prompt of texts and images in turn, for one of the families.

    Args:
        family: its name.
    """

    def __init__(self, family: str) -> None:
        self.family = family
        self.ids: list[int] = []
        self.images: list[int] = []

    def say(self, length: int, seed: int) -> Chat:
        self.ids = [*self.ids, *text(length, seed)]
        return self

    def show(self, image: int) -> Chat:
        self.ids = [*self.ids, IMAGE_START, *[IMAGE] * self.tokens_an_image, IMAGE_END]
        self.images = [*self.images, image]
        return self

    def goes_on(self, output: Tensor) -> Chat:
        self.ids = output[0].tolist()
        return self

    def copy(self) -> Chat:
        other = Chat(self.family)
        other.ids, other.images = self.ids, self.images
        return other

    @property
    def tokens_an_image(self) -> int:
        return NUM_TOKENS.get(self.family, 6)

    @property
    def keys(self) -> list[str]:
        return [f"image {image}" for image in self.images]

    @property
    def words(self) -> dict[str, Tensor]:
        ids = torch.tensor([self.ids])
        types = {"LLaVA": None, "Gemma 3 with images": "token_type_ids"}.get(self.family, "mm_token_type_ids")
        words = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return words | ({types: (ids == IMAGE).long()} if types else {})

    @property
    def inputs(self) -> dict[str, Tensor]:
        """All that the model wants, every image included."""
        shape = PIXELS.get(self.family, (24, 96))
        pixels = [torch.randn(shape, generator=torch.Generator().manual_seed(image)) for image in self.images]
        inputs = self.words
        if pixels:
            inputs["pixel_values"] = torch.cat(pixels)
            if self.family not in PIXELS:
                inputs["image_grid_thw"] = torch.tensor([[1, 4, 6]] * len(pixels))
        return inputs


SLOW = ["Gemma 3 with images", *SIBLINGS]


@pytest.fixture(params=["LLaVA", "Qwen2-VL", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {}


@pytest.fixture
def model(family: str, models: dict[str, PreTrainedModel]) -> PreTrainedModel:
    if family not in models:
        models[family] = build(family)
    return models[family]


def cold(model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What the model says without any reuse."""
    return model.generate(**inputs, **{CACHE_ARGUMENT: DynamicCache(config=model.config)}, **OPTIONS | options)


def warm(store: BlockStore, inputs: dict[str, Tensor], extra_key: Any = None, **options: Any) -> tuple[Tensor, int]:
    """What it says with the store, given all images again, and how many tokens were reused."""
    cache = store.cache_for(**inputs, extra_key=extra_key)
    reused = cache.stats().reused_tokens
    output = store.model.generate(**inputs, **{CACHE_ARGUMENT: cache}, **OPTIONS | options)
    store.commit(cache, output)
    return output, reused


class TestWithoutKeys:
    def test_nothing_is_served_from_the_first_placeholder_on(self, model, family):
        store = make_store(model)
        first, second = (Chat(family).say(20, 0).show(image).say(9, 1) for image in (1, 2))
        before = first.ids.index(IMAGE)
        for chat, expected in ((first, 0), (second, before), (first, before)):
            output, reused = warm(store, chat.inputs)
            assert reused == expected
            assert torch.equal(output, cold(model, chat.inputs))
        assert max(len(run.tokens) for run in store.nodes()) <= SIZE
        assert not any((run.tokens == IMAGE).any() for run in store.nodes())
        assert "no extra_key= names" in store.cache_for(**first.inputs).stats().why
        check_unheld(store)

    def test_a_turn_without_pixels_is_computed_like_a_cold_one(self, model, family):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        warm(store, chat.inputs)
        output, reused = warm(store, chat.words)
        assert reused == chat.ids.index(IMAGE)
        assert torch.equal(output, cold(model, chat.words))


class TestKeys:
    def test_the_text_before_the_first_image_is_everybodys(self, model, family):
        store = make_store(model)
        one, other = (Chat(family).say(20, 0).show(image).say(9, 1) for image in (1, 2))
        warm(store, one.inputs, one.keys)
        output, reused = warm(store, other.inputs, other.keys)
        assert reused == one.ids.index(IMAGE)
        assert torch.equal(output, cold(model, other.inputs))
        output, reused = warm(store, Chat(family).say(20, 0).say(4, 3).words)
        assert reused == 20
        assert torch.equal(output, cold(model, Chat(family).say(20, 0).say(4, 3).words))

    @pytest.mark.parametrize("key", ["one str", "a list"])
    def test_a_known_image_is_left_out(self, model, family, key):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        key = chat.keys if key == "a list" else "all of it"
        output, _ = warm(store, chat.inputs, key)
        following = chat.copy().goes_on(output).say(6, 2)
        warm(store, Chat(family).show(3).say(9, 4).inputs, ["image 3"])  # somebody else's, in between
        again, reused = warm(store, following.words, key)
        assert reused == output.shape[1] - 1
        assert torch.equal(again, cold(model, following.inputs))
        check_unheld(store)

    def test_the_first_image_stays_when_the_second_is_another(self, model, family):
        store = make_store(model)
        begins = Chat(family).say(20, 0).show(1).say(9, 1)
        one, other = (begins.copy().show(image).say(7, 2) for image in (2, 3))
        warm(store, one.inputs, one.keys)
        cache, rest = store.cache_and_inputs(**other.inputs, extra_key=other.keys)
        assert cache.stats().reused_tokens == len(begins.ids) + 1  # the token that begins an image is a word
        assert len(rest["pixel_values"]) == len(other.inputs["pixel_values"]) // 2
        output = model.generate(**rest, **{CACHE_ARGUMENT: cache}, **OPTIONS)
        assert torch.equal(output, cold(model, other.inputs))
        store.commit(cache, output)
        cache, rest = store.cache_and_inputs(**other.inputs, extra_key=other.keys)
        assert "pixel_values" not in rest
        assert torch.equal(model.generate(**rest, **{CACHE_ARGUMENT: cache}, **OPTIONS), output)

    def test_one_str_names_all_images(self, model, family):
        store = make_store(model)
        one, other = (Chat(family).say(20, 0).show(1).say(9, 1).show(image).say(7, 2) for image in (2, 3))
        warm(store, one.inputs, "1 and 2")
        output, reused = warm(store, other.inputs, "1 and 3")
        assert reused == one.ids.index(IMAGE)
        assert torch.equal(output, cold(model, other.inputs))
        for chat, key in ((one, "1 and 2"), (other, "1 and 3")):
            output, reused = warm(store, chat.words, key)
            assert reused == len(chat.ids) - 1
            assert torch.equal(output, cold(model, chat.inputs))

    def test_the_same_image_at_another_place_is_computed(self, model, family):
        store = make_store(model)
        one, other = Chat(family).say(20, 0).show(1).say(5, 2), Chat(family).say(19, 0).show(1).say(5, 2)
        warm(store, one.inputs, one.keys)
        output, reused = warm(store, other.inputs, other.keys)
        assert reused == 19
        assert torch.equal(output, cold(model, other.inputs))

    def test_images_that_are_neither_given_nor_known_are_missed(self, model, family):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        with pytest.raises(InvalidArgumentError, match=f"{chat.tokens_an_image} tokens of the prompt stand for images"):
            store.cache_for(**chat.words, extra_key=chat.keys)

    def test_some_of_the_images_are_not_enough(self, model, family):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1)
        warm(store, chat.inputs, chat.keys)
        chat.say(4, 1).show(2)
        only_new = Chat(family).show(2).inputs
        pixels = {name: value for name, value in only_new.items() if name.startswith(("pixel", "image_grid"))}
        with pytest.raises(InvalidArgumentError, match="names 2 images of the prompt, but the inputs hold 1"):
            store.cache_for(**chat.words, **pixels, extra_key=chat.keys)

    @pytest.mark.parametrize("keys", [[], ["a", "b"]])
    def test_there_is_a_key_for_each_run_of_placeholders(self, model, family, keys):
        chat = Chat(family).say(20, 0).show(1).say(9, 1)
        with pytest.raises(InvalidArgumentError, match=f"{len(keys)} keys, but the prompt has 1 runs"):
            make_store(model).cache_for(**chat.inputs, extra_key=keys)

    def test_a_batch_has_keys_for_each_row(self, model, family):
        store = make_store(model)
        chats = [Chat(family).say(20, 0).show(image).say(9, 1) for image in (1, 2)]
        inputs = {name: torch.cat([chat.inputs[name] for chat in chats]) for name in chats[0].inputs}
        expected = cold(model, inputs)
        with pytest.raises(InvalidArgumentError, match="the key of each of the 2 rows"):
            store.cache_for(**inputs, extra_key="both")
        keys = [chat.keys for chat in chats]
        output, _ = warm(store, inputs, keys)
        assert torch.equal(output, expected)
        cache, rest = store.cache_and_inputs(**inputs, extra_key=keys)
        assert "pixel_values" not in rest
        assert cache.get_seq_length() == len(chats[0].ids) - 1
        assert torch.equal(model.generate(**rest, **{CACHE_ARGUMENT: cache}, **OPTIONS), expected)
        del cache
        for chat in chats:
            assert torch.equal(warm(store, chat.words, chat.keys)[0], cold(model, chat.inputs))
        check_unheld(store)

    def test_placeholders_that_a_model_generates_are_not_known(self, model, family):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        cache = store.cache_for(**chat.inputs, extra_key=chat.keys)
        options = {**OPTIONS, "suppress_tokens": [token for token in range(VOCABULARY) if token != IMAGE]}
        output = model.generate(**chat.inputs, **{CACHE_ARGUMENT: cache}, **options)
        assert output[0, -1] == IMAGE
        assert store.commit(cache, output) == len(chat.ids)


class TestSessions:
    @pytest.mark.parametrize("given", ["all images again", "keys only"])
    def test_a_chat_about_several_images(self, model, family, given):
        store, other = make_store(model), Chat(family).show(9).say(12, 8)
        chat, known = Chat(family).say(20, 0), 0
        with store.session() as session:
            for turn in range(4):
                is_new = turn in (0, 2)
                chat = (chat.copy().show(turn) if is_new else chat.copy()).say(7, turn)
                expected = cold(model, chat.inputs)
                cold(model, other.inputs)  # leaves its positions in the model
                inputs = chat.inputs if is_new or given == "all images again" else chat.words
                output = session.generate(**inputs, extra_key=chat.keys, **OPTIONS)
                assert torch.equal(output, expected)
                assert session.cache.stats().reused_tokens >= known
                known = output.shape[1] - 1
                chat = chat.copy().goes_on(output)
        check_unheld(store)

    @pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True, "top_k": 1}])
    def test_beams_and_samples(self, model, family, options):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        expected = cold(model, chat.inputs, **options)
        for inputs in (chat.inputs, chat.inputs, chat.words):
            output = store.session().generate(**inputs, extra_key=chat.keys, **OPTIONS | options)
            assert torch.equal(output, expected)

    def test_without_keys_images_are_computed_every_time(self, model, family):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        with store.session() as session:
            for _ in range(2):
                output = session.generate(**chat.inputs, **OPTIONS)
                assert torch.equal(output, cold(model, chat.inputs))
                chat = chat.copy().goes_on(output).say(5, 3)
            assert session.cache.stats().reused_tokens == chat.ids.index(IMAGE)


class TestPositions:
    """What a model keeps beside the cache is that of the prompt, whoever generated last."""

    @pytest.fixture(params=["Qwen2-VL", *(pytest.param(name, marks=pytest.mark.slow) for name in SIBLINGS)])
    def family(self, request: pytest.FixtureRequest) -> str:
        return request.param

    def test_text_after_somebody_elses_image(self, model, family):
        store, chat = make_store(model), Chat(family).say(40, 0)
        output, _ = warm(store, chat.words)
        following = chat.copy().goes_on(output).say(5, 1)
        expected = cold(model, following.words)
        cold(model, Chat(family).show(9).say(12, 8).inputs)
        again, reused = warm(store, following.words)
        assert reused == output.shape[1] - 1
        assert torch.equal(again, expected)

    def test_caches_that_are_used_in_another_order_than_they_were_made(self, model, family):
        store = make_store(model)
        chats = [Chat(family).say(20, 0).show(1).say(9, 1), Chat(family).say(30, 4), Chat(family).show(2).show(3)]
        for chat in chats:
            warm(store, chat.inputs, chat.keys)
        longer = [chat.copy().say(8, 5) for chat in chats]
        caches = [store.cache_for(**chat.words, extra_key=chat.keys) for chat in longer]
        for chat, cache in zip(reversed(longer), reversed(caches), strict=True):
            assert cache.stats().reused_tokens == len(chat.ids) - 8
            output = model.generate(**chat.words, **{CACHE_ARGUMENT: cache}, **OPTIONS)
            assert torch.equal(output, cold(model, chat.inputs))

    def test_the_next_turn_with_the_same_cache(self, model, family):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        warm(store, chat.inputs, chat.keys)
        cache = store.cache_for(**chat.words, extra_key=chat.keys)
        for turn in range(2):
            expected = cold(model, chat.inputs)
            cold(model, Chat(family).show(9).show(8).say(12, 8).inputs)
            output = model.generate(**chat.words, **{CACHE_ARGUMENT: cache}, **OPTIONS)
            assert torch.equal(output, expected)
            store.commit(cache, output)
            chat = chat.copy().goes_on(output).say(6, turn)

    def test_another_process_knows_them(self, model, family, tmp_path):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        warm(store, chat.inputs, chat.keys)
        store.save(tmp_path / "store.safetensors")
        fresh = build(family)
        loaded = BlockStore.load(tmp_path / "store.safetensors", fresh, memory="4MiB")
        output, reused = warm(loaded, chat.words, chat.keys)
        assert reused == len(chat.ids) - 1
        assert torch.equal(output, cold(model, chat.inputs))

    def test_padded_rows(self, model, family):
        store = make_store(model)
        chats = [Chat(family).say(20, 0).show(1).say(9, 1), Chat(family).say(5, 0).show(2).say(9, 1)]
        for chat in chats:
            warm(store, chat.inputs, chat.keys)
        width = len(chats[0].ids)
        ids, mask = torch.zeros(2, width, dtype=torch.long), torch.zeros(2, width, dtype=torch.long)
        for row, chat in enumerate(chats):
            ids[row, width - len(chat.ids) :], mask[row, width - len(chat.ids) :] = torch.tensor(chat.ids), 1
        cold(model, Chat(family).show(9).show(8).say(12, 8).inputs)
        cache = store.cache_for(ids, mask, extra_key=[chat.keys for chat in chats])
        assert cache.get_seq_length() == width - 1
        output = model.generate(input_ids=ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, **OPTIONS)
        expected = [cold(model, chat.inputs)[0, len(chat.ids) :] for chat in chats]
        assert torch.equal(output[:, width:], torch.stack(expected))
        for chat, image in zip(chats, (5, 6), strict=True):
            chat.images = [image]
        inputs = {name: torch.cat([chat.inputs[name] for chat in chats]) for name in ("pixel_values", "image_grid_thw")}
        inputs |= {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
        expected = [cold(model, chat.inputs)[0, len(chat.ids) :] for chat in chats]
        for reused in (width - len(chats[1].ids) + 6, width - 1):
            cache, rest = store.cache_and_inputs(**inputs, extra_key=[chat.keys for chat in chats])
            assert cache.get_seq_length() == reused
            output = model.generate(**rest, **{CACHE_ARGUMENT: cache}, **OPTIONS)
            assert torch.equal(output[:, width:], torch.stack(expected))
            store.commit(cache, output)

    @pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
    def test_a_copy_of_the_model_asks_for_its_own(self, model, family, again):
        store, chat = make_store(model), Chat(family).say(20, 0).show(1).say(9, 1)
        warm(store, chat.inputs, chat.keys)
        other = again(model)
        model.model.rope_deltas = "not to be seen by another model"
        copied = make_store(other)
        expected = cold(other, chat.inputs)
        warm(copied, chat.inputs, chat.keys)
        assert torch.equal(warm(copied, chat.words, chat.keys)[0], expected)
        assert model.model.rope_deltas == "not to be seen by another model"
