"""What `eval.prefix` measures with a model: the time to the first token of prompts whose beginning is known, and
many questions on one document."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from eval.common.failures import reason
from eval.common.memory import held_storages
from eval.common.prompts import text_prompts
from eval.common.timing import interleave, median_ratio, now
from eval.common.variants import BASELINE, VARIANTS, Variant, cache_argument, plain_generation
from eval.prefix.batching import shared_prefix_tokens
from hf_paged_cache import BlockStore

ANSWER_TOKENS = 64
QUESTION_TOKENS = 32
WARMUP_PROMPT = 128
ATTENTION = "hf_paged"

Row = dict[str, Any]
Run = Callable[[torch.Tensor], "FirstToken"]


@dataclass(frozen=True)
class FirstToken:
    """One call for one new token. `seconds` counts the lookup, and not the commit after it."""

    seconds: float
    lookup_seconds: float
    commit_seconds: float
    reused_tokens: int
    token: int


@dataclass(frozen=True)
class Answers:
    """All questions on a document, answered.

    tokens: `[questions, new_tokens]`. num_bytes: of all caches at the end, with that of the document if there is one.
    """

    seconds: float
    reused_tokens: int
    num_bytes: int
    tokens: torch.Tensor


@dataclass
class PrefixBench:
    """Measures with one model and collects what comes out.

    memory: the limit of every store. codecs: of the stores. rows: one for each case and way to serve it. differences:
    tokens that are not the baseline's, in plain words. failures: what could not be measured and why.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    repeats: int
    memory: str
    codecs: Sequence[str]
    rows: list[Row] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def warm_up(self) -> None:
        """Generates with each cache once, so that nothing is compiled or set up later."""
        prompt, longer = self._text(WARMUP_PROMPT), self._text(WARMUP_PROMPT + QUESTION_TOKENS)
        for variant in self._cold_variants():
            self._cold(variant, prompt)
        for store in self._stores().values():
            self._warm(store, prompt)
            self._warm(store, longer)

    def known(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Prompts that begin alike and end differently, in every round another one."""
        head, stores = self._text(cached_tokens), self._stores()
        with plain_generation(self.model, ATTENTION):
            for store in stores.values():
                store.pin(head).release()
        prompts = [torch.cat([head, tail], dim=1) for tail in self._texts(prompt_tokens - cached_tokens, self.repeats)]
        runs = self._runs({kv: (partial(self._warm, store), prompts) for kv, store in stores.items()}, prompts)
        self._first_tokens("known", prompt_tokens, runs)

    def chat(self, history_tokens: int) -> None:
        """A second question after a first one and its answer."""
        first, questions = self._text(history_tokens - ANSWER_TOKENS), self._texts(QUESTION_TOKENS, self.repeats)
        warm, histories = {}, {}
        for kv, store in self._stores().items():
            with plain_generation(self.model, ATTENTION):
                cache = store.cache_for(first)
                histories[kv] = self._generate(first, cache, ANSWER_TOKENS)
                store.commit(cache, histories[kv])
            prompts = [torch.cat([histories[kv], question], dim=1) for question in questions]
            warm[kv] = (partial(self._warm, store), prompts)
        same = [kv for kv, history in histories.items() if torch.equal(history, histories[self.codecs[0]])]
        runs = self._runs(warm, warm[self.codecs[0]][1])
        self._first_tokens("chat", history_tokens + QUESTION_TOKENS, runs, comparable=same)

    def document(self, document_tokens: int, num_questions: int, new_tokens: int, repeats: int) -> None:
        """Questions on one document, by several ways to keep it, with all caches alive at the end."""
        document, prompts = self._questions(document_tokens, num_questions)
        ways: dict[str, tuple[str, Callable[[], Answers]]] = {
            BASELINE: ("DynamicCache, nothing reused", partial(self._each_alone, prompts, new_tokens)),
            "deepcopy": (
                "DynamicCache, copy.deepcopy of the document's",
                partial(self._each_from_a_copy, document, prompts, new_tokens),
            ),
            "store": ("BlockStore, one after the other", partial(self._each_from_store, prompts, new_tokens)),
            "store batch": ("BlockStore, one batch", partial(self._batch_from_store, prompts, new_tokens)),
        }
        results, failures = interleave({name: run for name, (_, run) in ways.items()}, repeats)
        self._note_failures("document", {ways[name][0]: why for name, why in failures.items()}, BASELINE in failures)
        baseline = results[BASELINE]
        for name, answers in results.items():
            is_same = torch.equal(answers[-1].tokens, baseline[-1].tokens)
            self.rows.append({
                "section": "document",
                "cache": name,
                "label": ways[name][0],
                "questions": num_questions,
                "document_tokens": document_tokens,
                "prompt_tokens": sum(prompt.shape[1] for prompt in prompts),
                "reused_tokens": answers[-1].reused_tokens,
                "seconds": statistics.median(each.seconds for each in answers),
                "seconds_min": min(each.seconds for each in answers),
                "ratio": median_ratio([each.seconds for each in answers], [each.seconds for each in baseline]),
                "num_bytes": answers[-1].num_bytes,
                "bytes_ratio": answers[-1].num_bytes / baseline[-1].num_bytes,
                "tokens_equal": is_same,
            })  # fmt: skip
            if not is_same:
                self.differences.append(f"{ways[name][0]}: other answers than without reuse")

    def batching(self, document_tokens: int, num_questions: int) -> None:
        """Tokens that transformers' continuous batching reuses for questions on one document, and ours."""
        _, prompts = self._questions(document_tokens, num_questions)
        reused: dict[str, list[int]] = {}
        try:
            with plain_generation(self.model, "sdpa"):
                reused["generate_batch (transformers)"] = shared_prefix_tokens(self.model, prompts)
        except Exception as error:
            self.failures.append(f"generate_batch (transformers): {reason(error)}")
        with plain_generation(self.model, ATTENTION):
            store = self._store()
            reused["BlockStore, one after the other"] = [self._warm(store, prompt).reused_tokens for prompt in prompts]
            cache = self._store().cache_for(torch.cat(prompts))
            reused["BlockStore, one batch"] = [cache.stats().reused_tokens]
        total = sum(prompt.shape[1] for prompt in prompts)
        for label, tokens in reused.items():
            self.rows.append({
                "section": "batching",
                "label": label,
                "questions": num_questions,
                "document_tokens": document_tokens,
                "prompt_tokens": total,
                "reused_tokens": sum(tokens),
                "reused_ratio": sum(tokens) / total,
                "reused_by_prompt": tokens,
            })  # fmt: skip

    def _first_tokens(
        self,
        section: str,
        prompt_tokens: int,
        runs: Mapping[str, Callable[[], FirstToken]],
        comparable: Sequence[str] | None = None,
    ) -> None:
        """Takes turns and adds a row for each. `comparable`: stores that were asked the same as the baseline."""
        results, failures = interleave(runs, self.repeats)
        labels = {name: self._label(name) for name in runs}
        self._note_failures(section, {labels[name]: why for name, why in failures.items()}, BASELINE in failures)
        baseline = results[BASELINE]
        for name, calls in results.items():
            is_comparable = comparable is None or name in comparable or name not in self.codecs
            is_same = [call.token for call in calls] == [call.token for call in baseline]
            self.rows.append({
                "section": section,
                "cache": name,
                "label": labels[name],
                "prompt_tokens": prompt_tokens,
                # Later rounds may find more: the question of an earlier one may begin alike.
                "reused_tokens": min(call.reused_tokens for call in calls),
                "first_ms": 1e3 * statistics.median(call.seconds for call in calls),
                "first_ms_min": 1e3 * min(call.seconds for call in calls),
                "first_ratio": median_ratio([call.seconds for call in calls], [call.seconds for call in baseline]),
                "lookup_ms": 1e3 * statistics.median(call.lookup_seconds for call in calls),
                "commit_ms": 1e3 * statistics.median(call.commit_seconds for call in calls),
                "tokens_equal": is_same if is_comparable else None,
            })  # fmt: skip
            if is_comparable and not is_same:
                lossy = (
                    " It stores rounded keys and values, so this is expected." if name not in (BASELINE, "raw") else ""
                )
                self.differences.append(f"{labels[name]} ({section}): another first token than DynamicCache.{lossy}")

    def _runs(
        self, warm: Mapping[str, tuple[Run, Sequence[torch.Tensor]]], cold_prompts: Sequence[torch.Tensor]
    ) -> dict[str, Callable[[], FirstToken]]:
        """For each way to serve a prompt a call that takes the next one, those without reuse first."""
        runs: dict[str, tuple[Run, Sequence[torch.Tensor]]] = {
            variant.name: (partial(self._cold, variant), cold_prompts) for variant in self._cold_variants()
        }
        return {name: partial(_next_prompt, run, iter(prompts)) for name, (run, prompts) in {**runs, **warm}.items()}

    def _cold(self, variant: Variant, prompt: torch.Tensor) -> FirstToken:
        with plain_generation(self.model, variant.attn_implementation):
            gc.collect()
            start = now(self.model.device)
            cache = variant.make(self.model, {"input_ids": prompt}, 1)
            output = self._generate(prompt, cache, 1)
            seconds = now(self.model.device) - start
        return FirstToken(seconds, 0.0, 0.0, 0, int(output[0, -1]))

    def _warm(self, store: BlockStore, prompt: torch.Tensor) -> FirstToken:
        with plain_generation(self.model, ATTENTION):
            store.cache_for(prompt[:, :1])  # another attention was used before, which the first lookup notices
            gc.collect()
            start = now(self.model.device)
            cache = store.cache_for(prompt, torch.ones_like(prompt))
            looked_up = now(self.model.device)
            output = self._generate(prompt, cache, 1)
            done = now(self.model.device)
            store.commit(cache, output)
            committed = now(self.model.device)
        return FirstToken(
            done - start, looked_up - start, committed - done, cache.stats().reused_tokens, int(output[0, -1])
        )

    def _each_alone(self, prompts: Sequence[torch.Tensor], new_tokens: int) -> Answers:
        with plain_generation(self.model, "sdpa"):
            start = now(self.model.device)
            caches = [DynamicCache(config=self.model.config) for _ in prompts]
            outputs = [self._generate(*each, new_tokens) for each in zip(prompts, caches, strict=True)]
            return self._answers(start, 0, outputs, caches, new_tokens)

    def _each_from_a_copy(self, document: torch.Tensor, prompts: Sequence[torch.Tensor], new_tokens: int) -> Answers:
        with plain_generation(self.model, "sdpa"):
            start = now(self.model.device)
            prefilled = DynamicCache(config=self.model.config)
            with torch.no_grad():
                self.model(document, logits_to_keep=1, **{cache_argument(self.model): prefilled})
            caches = [copy.deepcopy(prefilled) for _ in prompts]
            outputs = [self._generate(*each, new_tokens) for each in zip(prompts, caches, strict=True)]
            reused = document.shape[1] * (len(prompts) - 1)
            return self._answers(start, reused, outputs, [prefilled, *caches], new_tokens)

    def _each_from_store(self, prompts: Sequence[torch.Tensor], new_tokens: int) -> Answers:
        with plain_generation(self.model, ATTENTION):
            store, caches, outputs = self._store_in_use(prompts[0]), [], []
            start = now(self.model.device)
            for prompt in prompts:
                caches.append(store.cache_for(prompt))
                outputs.append(self._generate(prompt, caches[-1], new_tokens))
                store.commit(caches[-1], outputs[-1])
            return self._answers(start, store.stats().hit_tokens, outputs, caches, new_tokens)

    def _batch_from_store(self, prompts: Sequence[torch.Tensor], new_tokens: int) -> Answers:
        with plain_generation(self.model, ATTENTION):
            store, batch = self._store_in_use(prompts[0]), torch.cat([*prompts])
            start = now(self.model.device)
            cache = store.cache_for(batch)
            output = self._generate(batch, cache, new_tokens)
            store.commit(cache, output)
            return self._answers(start, store.stats().hit_tokens, [output], [cache], new_tokens)

    def _answers(
        self, start: float, reused: int, outputs: Sequence[torch.Tensor], caches: Sequence[Cache], new_tokens: int
    ) -> Answers:
        seconds = now(self.model.device) - start
        return Answers(seconds, reused, _all_bytes(caches), torch.cat([*outputs])[:, -new_tokens:].cpu())

    def _generate(self, prompt: torch.Tensor, cache: Cache, new_tokens: int) -> torch.Tensor:
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), cache_argument(self.model): cache}
        return self.model.generate(**inputs, max_new_tokens=new_tokens)

    def _questions(self, document_tokens: int, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A document, and prompts that begin with it."""
        document = self._text(document_tokens)
        return document, [torch.cat([document, question], dim=1) for question in self._texts(QUESTION_TOKENS, count)]

    def _text(self, length: int) -> torch.Tensor:
        return self._texts(length, 1)[0]

    def _texts(self, length: int, count: int) -> list[torch.Tensor]:
        """Ids `[1, length]`, each from another place of the text."""
        return [*text_prompts(self.tokenizer, [length] * count)["input_ids"].to(self.model.device).split(1)]

    def _store(self, kv: str = "raw") -> BlockStore:
        return BlockStore(self.model, memory=self.memory, kv=kv)

    def _store_in_use(self, prompt: torch.Tensor) -> BlockStore:
        """A store that has read the model's weights, which the first lookup does, and knows nothing."""
        store = self._store()
        store.cache_for(prompt[:, :1])
        return store

    def _stores(self) -> dict[str, BlockStore]:
        return {kv: self._store(kv) for kv in self.codecs}

    def _cold_variants(self) -> list[Variant]:
        return [VARIANTS[BASELINE], VARIANTS["paged"]]

    def _label(self, name: str) -> str:
        if name in self.codecs:
            return "BlockStore" if name == "raw" else f"BlockStore ({name})"
        return f"{VARIANTS[name].cache}, nothing reused"

    def _note_failures(self, section: str, failures: Mapping[str, str], is_fatal: bool) -> None:
        if is_fatal:
            raise RuntimeError(f"the baseline failed ({section}): {failures}")
        self.failures += [f"{label} ({section}): {why}" for label, why in failures.items()]


def _next_prompt(run: Run, prompts: Iterator[torch.Tensor]) -> FirstToken:
    return run(next(prompts))


def _all_bytes(caches: Sequence[Cache]) -> int:
    """Bytes of keys and values that caches hold together. Caches of one store count what all of them hold."""
    if hasattr(caches[0], "stats"):
        return caches[0].stats().bytes_used
    storages = {address: storage for cache in caches for address, storage in held_storages(cache).items()}
    return sum(storage.nbytes() for storage in storages.values())
