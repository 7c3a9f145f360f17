"""`hf-paged-cache demo`: the same generations with DynamicCache and with PagedCache, side by side."""

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from tqdm import tqdm
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_paged_cache import PagedCache, prefill
from hf_paged_cache.errors import InvalidArgumentError, UnsupportedError

NUM_BEAMS = 4
WIDTH = 88

QUESTION = "Why do computers divide their memory into pages?"
SHORT_QUESTIONS = ("What is a library?", "Name three animals that live in the sea, and say one thing about each.")
LONG_TEXT = """\
When a computer runs many programs at once, each program acts as if it owned one long and unbroken \
stretch of memory. It does not. The operating system cuts the real memory into pages, all of one size, \
and keeps a page table for every program. The table says which page of real memory stands behind which \
part of the stretch that the program believes in. Pages are handed out only when they are needed, and \
they need not lie next to each other. If two programs use the same library, both tables point to the \
same pages, and the library is kept only once. If one of them writes to a shared page, the system first \
makes a copy of that one page, and the other program never notices.

A language model that writes a text meets the same problem. For every token that it has read it keeps a \
key and a value in every layer, and at each step it looks at all of them. The usual way is to keep them \
in one long tensor and to build a longer tensor at each step, which copies everything that was there \
before. If the model follows four possible continuations at once, it keeps four such tensors, although \
the beginning of all four is the same. If several texts of different lengths are continued together, the \
short ones are filled up to the length of the longest, and the filling is stored as well.

A paged cache cuts the keys and values into blocks of equal size and keeps a block table for every text. \
A new token goes into the free part of the last block, and a new block is taken when that one is full. \
Four continuations of one beginning point to the same blocks, and only the blocks at the end, where they \
differ, are their own. When one continuation is dropped, its blocks go back to the pool. Nothing of the \
history is moved or copied for any of this."""
LONG_QUESTION = "Explain in two sentences what a paged cache does."

Options = dict[str, object]
Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scenario:
    """One way of generating that is run with both caches: `prompts` are one batch.

    `lessons` says in words what the figures of each use of the paged cache show.
    """

    title: str
    prompts: tuple[str, ...]
    num_beams: int
    lessons: tuple[str, ...]


@dataclass(frozen=True)
class Generation:
    """What one `generate` call left: whole sequences [B, L], and bytes of the keys and values that were kept."""

    sequences: torch.Tensor
    bytes_peak: int
    bytes_at_end: int


Generate = Callable[[PreTrainedModel, Inputs, Options], Generation]


@dataclass(frozen=True)
class Measurement:
    """One cache in one part. `answers` holds the new token ids of each prompt, up to the end-of-text token."""

    cache: str
    answers: list[list[int]]
    seconds: float
    bytes_peak: int
    bytes_at_end: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts by the time of the whole call, prompt included."""
        return sum(map(len, self.answers)) / self.seconds


@dataclass(frozen=True)
class Comparison:
    """One part with DynamicCache, with PagedCache, and for beams with PagedCache forked after the prompt."""

    part: Scenario
    dynamic: Measurement
    paged: tuple[Measurement, ...]

    @property
    def same(self) -> bool:
        """Whether every cache gave the same tokens."""
        return all(measurement.answers == self.dynamic.answers for measurement in self.paged)


class _AdvanceBar(StoppingCriteria):
    """Stops nothing: `generate` calls it once a step in every decoding mode, which moves the bar."""

    def __init__(self, bar: tqdm) -> None:
        self._bar = bar

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        self._bar.update()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str | None,
    max_new_tokens: int,
    block_size: int,
) -> list[Comparison]:
    """Generate plainly, with beams and with a left-padded batch, each with both caches; print texts and a table.

    Args:
        prompt: text to continue in place of the built-in ones; in the batch it stands beside short ones.
        max_new_tokens: tokens to generate at most for each prompt.
        block_size: token slots of one block of the paged cache.

    Raises:
        InvalidArgumentError: a prompt is too long for the model, or the tokenizer cannot pad.
        PagedCacheError: the paged cache does not support the model or the block size.
    """
    parts = _parts(prompt)
    inputs = [_encode(model, tokenizer, part.prompts, max_new_tokens) for part in parts]
    paged = partial(_with_paged_cache, block_size=block_size)
    # Keeps what only first calls do (threads, kernels, memory) out of the figures.
    for generate in (_with_dynamic_cache, paged):
        generate(model, inputs[0], _options(max_new_tokens=2, num_beams=1))
    print(_format_heading(model, block_size))

    comparisons = []
    with tqdm(unit="step", leave=False, disable=None) as bar:
        for part, encoded in zip(parts, inputs, strict=True):
            ways: dict[str, Generate] = {"DynamicCache": _with_dynamic_cache, "PagedCache": paged}
            if part.num_beams > 1:
                ways[f"PagedCache, fork({part.num_beams})"] = partial(paged, fork=part.num_beams)
            measurements = []
            for name, generate in ways.items():
                bar.reset(total=max_new_tokens)
                bar.set_description(f"{part.title}: {name}")
                options = _options(max_new_tokens, part.num_beams)
                options["stopping_criteria"] = StoppingCriteriaList([_AdvanceBar(bar)])
                measurements.append(_measure(name, generate, model, encoded, options))
            comparisons.append(Comparison(part, measurements[0], tuple(measurements[1:])))
            bar.write(_format_texts(comparisons[-1], tokenizer))
    print(_format_table(comparisons))
    print(_format_lessons(comparisons))
    return comparisons


def _parts(prompt: str | None) -> tuple[Scenario, ...]:
    long_prompt = prompt or f"{LONG_TEXT}\n\n{LONG_QUESTION}"
    return (
        Scenario(
            title="Plain",
            prompts=(prompt or QUESTION,),
            num_beams=1,
            lessons=(
                "One sequence takes the same bytes in both, but for the unfilled rest of the last block and the "
                "blocks that the pools keep ready",
            ),
        ),
        Scenario(
            title=f"{NUM_BEAMS} beams",
            prompts=(long_prompt,),
            num_beams=NUM_BEAMS,
            lessons=(
                f"DynamicCache keeps the prompt {NUM_BEAMS} times; the {NUM_BEAMS} beams of PagedCache share the "
                "prompt's blocks, from the first reorder on",
                "With prefill and fork the prompt is computed and stored once, and shared from the start",
            ),
        ),
        Scenario(
            title=f"Batch of {len(SHORT_QUESTIONS) + 2}",
            prompts=(*SHORT_QUESTIONS, QUESTION, long_prompt),
            num_beams=1,
            lessons=("DynamicCache stores the padding of the short prompts; in PagedCache it takes no blocks",),
        ),
    )


def _encode(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], max_new_tokens: int
) -> Inputs:
    """Token ids and mask [B, L] of the prompts, left-padded, in the tokenizer's chat format if it has one."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InvalidArgumentError("the tokenizer has neither a padding nor an end-of-text token: it cannot pad")
        tokenizer.pad_token = tokenizer.eos_token
    has_template = tokenizer.chat_template is not None
    if has_template:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        prompts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(
        list(prompts), padding=True, padding_side="left", add_special_tokens=not has_template, return_tensors="pt"
    )
    length = encoded["input_ids"].shape[1]
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and length + max_new_tokens > positions:
        raise InvalidArgumentError(
            f"{length} prompt tokens and {max_new_tokens} new ones do not fit in the model's {positions} positions"
        )
    return {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}


def _options(max_new_tokens: int, num_beams: int) -> Options:
    return {"max_new_tokens": max_new_tokens, "num_beams": num_beams, "do_sample": False, "use_cache": True}


def _with_dynamic_cache(model: PreTrainedModel, inputs: Inputs, options: Options) -> Generation:
    cache = DynamicCache(config=model.config)
    try:
        sequences = model.generate(**inputs, past_key_values=cache, **options)
    except ValueError as error:
        raise UnsupportedError(f"{type(model).__name__} does not generate with DynamicCache: {error}") from error
    stored = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    sizes = [tensor.nbytes for tensor in stored if isinstance(tensor, torch.Tensor)]
    if not sizes:
        raise UnsupportedError(f"{type(model).__name__} keeps no keys and values: there is no cache to compare")
    # A concatenation or a reorder holds one tensor of one layer twice for a moment.
    return Generation(sequences, bytes_peak=sum(sizes) + max(sizes), bytes_at_end=sum(sizes))


def _with_paged_cache(
    model: PreTrainedModel, inputs: Inputs, options: Options, *, block_size: int, fork: int = 1
) -> Generation:
    cache = PagedCache(model.config, block_size=block_size)
    with _attention(model, "hf_paged"):
        if fork > 1:
            prefill(model, cache, **inputs)
            cache = cache.fork(fork)
        sequences = model.generate(**inputs, past_key_values=cache, **options)
    stats = cache.stats()
    return Generation(sequences, bytes_peak=stats.bytes_peak, bytes_at_end=stats.bytes_used)


@contextmanager
def _attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _measure(name: str, generate: Generate, model: PreTrainedModel, inputs: Inputs, options: Options) -> Measurement:
    start = time.perf_counter()
    generation = generate(model, inputs, options)
    # Bringing the tokens to the CPU waits for the device, so it belongs to the time.
    rows = generation.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    seconds = time.perf_counter() - start
    end_tokens = model.generation_config.eos_token_id
    ends = set(end_tokens) if isinstance(end_tokens, list) else {end_tokens}
    answers = [_until_end(row, ends) for row in rows]
    return Measurement(name, answers, seconds, generation.bytes_peak, generation.bytes_at_end)


def _until_end(tokens: list[int], ends: set[int | None]) -> list[int]:
    length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]


def _format_heading(model: PreTrainedModel, block_size: int) -> str:
    with _attention(model, "hf_paged"):
        # Models that bring their own attention code keep it, and the cache is then gathered for it.
        paged_attention = model.config._attn_implementation
    return (
        f"{type(model).__name__}, {model.num_parameters() / 1e6:,.0f} M parameters, {model.dtype}, {model.device}\n"
        f"DynamicCache with {model.config._attn_implementation} attention, "
        f"PagedCache with {paged_attention} attention and blocks of {block_size} tokens"
    )


def _format_texts(comparison: Comparison, tokenizer: PreTrainedTokenizerBase) -> str:
    """Each prompt with its answer; with every cache's answer where they are not the same."""
    lines = ["", f"== {comparison.part.title} ".ljust(WIDTH, "=")]
    for index, prompt in enumerate(comparison.part.prompts):
        lines.append(f"> {_shorten(prompt)}")
        caches_of: dict[tuple[int, ...], list[str]] = {}
        for measurement in (comparison.dynamic, *comparison.paged):
            caches_of.setdefault(tuple(measurement.answers[index]), []).append(measurement.cache)
        for answer, caches in caches_of.items():
            text = tokenizer.decode(answer, skip_special_tokens=True).strip()
            lines += [
                textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="  ") for line in text.splitlines()
            ]
            lines.append("  [every cache]" if len(caches_of) == 1 else f"  [{'; '.join(caches)}]")
    return "\n".join(lines)


def _shorten(prompt: str) -> str:
    """One line with the first words and, if it is long, the last words of a prompt."""
    line = " ".join(prompt.split())
    half = (WIDTH - len(">  ... ")) // 2
    if len(line) <= 2 * half:
        return line
    return f"{line[:half].rpartition(' ')[0]} ... {line[-half:].partition(' ')[2]}"


def _format_table(comparisons: Sequence[Comparison]) -> str:
    heading = f"{'':<12} {'cache':<20} {'seconds':>8} {'tokens/s':>9} {'peak MiB':>9} {'end MiB':>8}  tokens"
    lines = ["", heading, "-" * len(heading)]
    for comparison in comparisons:
        dynamic = comparison.dynamic
        for measurement in (dynamic, *comparison.paged):
            verdict = "same" if measurement.answers == dynamic.answers else "DIFFER"
            lines.append(
                f"{comparison.part.title if measurement is dynamic else '':<12} {measurement.cache:<20} "
                f"{measurement.seconds:>8.2f} {measurement.tokens_per_second:>9.1f} "
                f"{measurement.bytes_peak / 2**20:>9.2f} {measurement.bytes_at_end / 2**20:>8.2f}  "
                f"{'' if measurement is dynamic else verdict}".rstrip()
            )
    lines.append("")
    return "\n".join(lines)


def _format_lessons(comparisons: Sequence[Comparison]) -> str:
    """What the table shows, in words, with the ratios to DynamicCache."""
    paragraphs = [
        "tokens/s: new tokens of all prompts by the time of the whole call, prompt included. MiB: keys and "
        "values. Peak of DynamicCache: its end, and once more the one tensor that is being copied. Peak of "
        "PagedCache: its pools, with unused blocks and the copy made while growing. Its end: the blocks in use. "
        "Each row is one call; python -m eval.speed measures time with repeats.",
    ]
    for comparison in comparisons:
        dynamic = comparison.dynamic
        for measurement, lesson in zip(comparison.paged, comparison.part.lessons, strict=True):
            time_ratio = measurement.seconds / dynamic.seconds
            peak_ratio = measurement.bytes_peak / dynamic.bytes_peak
            end_ratio = measurement.bytes_at_end / dynamic.bytes_at_end
            paragraphs.append(
                f"{comparison.part.title}, {measurement.cache}: {peak_ratio:.2f}x the peak, {end_ratio:.2f}x the end, "
                f"{time_ratio:.2f}x the time of DynamicCache. {lesson}."
            )
    if all(comparison.same for comparison in comparisons):
        paragraphs.append("Every cache gave the same tokens everywhere.")
    else:
        paragraphs.append(
            "The tokens are not the same everywhere. In 16 bit that happens where rounding decides between two tokens "
            "that are about equally likely; in fp32 it is an error."
        )
    return "\n".join(textwrap.fill(paragraph, WIDTH, subsequent_indent="  ") for paragraph in paragraphs)
