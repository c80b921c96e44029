"""`weights.Mapping`: how the tensors of a reader are made of published ones of other names and shapes.

A mapping is a loader: the reader's own one (`record`), or one made of rules. Both run once, on tensors without memory,
and `recording` turns what they do into regions. Nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from raylane.core.listing import listed
from raylane.errors import WeightsLayoutError
from raylane.weights.layout.boxes import HeldBox, StoredLayout, TensorLayout
from raylane.weights.layout.recording import LoadRecorder, Record, TensorStream, record

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _NameRule:
    """One step from published names to those of the reader: its text, and what it makes of all tensors."""

    text: str
    apply: Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class Mapping:
    """How a reader's tensors are made of published ones. `Mapping()` maps each name to itself.

    Rules apply in the order in which they are given; each returns a new mapping:

        weights.Mapping().rename(r"^model\\.", "decoder.").fuse(["q_proj", "k_proj", "v_proj"], "qkv_proj")

    Floating-point tensors are converted to the dtype of the reader's tensor without a rule. Names are those of
    tensors, such as `layers.0.q_proj.weight`; parts of names stand between dots.
    """

    rules: tuple[_NameRule, ...] = ()
    load: Callable[[TensorStream], Any] | None = None
    """The reader's own loader; None: rules."""

    @classmethod
    def record(cls, load_weights: Callable[[TensorStream], Any]) -> Mapping:
        """Map as a loader does, which is run once for each layout of a trainer.

        Args:
            load_weights: Takes an iterable of (name, tensor), and copies the tensors into those of the reader, as
                `load_weights` of vLLM's models does; or returns a module whose parameters they have become, as
                `from_pretrained(None, config=config, state_dict=dict(tensors))` of Hugging Face does. The tensors have
                no memory: views, slices, `clone`, `to`, `cat`, `stack` and `copy_` are recorded. Anything else raises
                WeightsLayoutError with the tensor, the operation and the line, before anything is written.
        """
        return cls(load=load_weights)

    def rename(self, pattern: str, replacement: str) -> Mapping:
        """Replace what a regular expression finds in each name (`re.sub`)."""
        compiled, text = re.compile(pattern), f"rename({pattern!r}, {replacement!r})"

        def apply(tensors: Tensors) -> Tensors:
            renamed: Tensors = {}
            for name, tensor in tensors.items():
                new = compiled.sub(replacement, name)
                if new in renamed:
                    raise WeightsLayoutError(f"{text} gives several tensors the name {new!r}")
                renamed[new] = tensor
            return renamed

        return self._with(text, apply)

    def prefix(self, prefix: str) -> Mapping:
        """Put a prefix before each name."""
        return self._with(
            f"prefix({prefix!r})", lambda tensors: {prefix + name: each for name, each in tensors.items()}
        )

    def fuse(self, parts: Sequence[str], into: str, *, dim: int = 0) -> Mapping:
        """Concatenate tensors whose names differ in one part, in the order of `parts`, under the part `into`."""
        patterns = [_part_of_name(part) for part in parts]

        def apply(tensors: Tensors) -> Tensors:
            groups: dict[str, dict[int, torch.Tensor]] = {}
            out: Tensors = {}
            for name, tensor in tensors.items():
                number = next((number for number, pattern in enumerate(patterns) if pattern.search(name)), None)
                if number is None:
                    out[name] = tensor
                else:
                    groups.setdefault(_replaced(patterns[number], into, name), {})[number] = tensor
            for name, found in groups.items():
                missing = [part for number, part in enumerate(parts) if number not in found]
                if missing:
                    raise WeightsLayoutError(f"{name!r} cannot be fused: of {list(parts)}, {missing} are not published")
                out[name] = torch.cat([found[number] for number in range(len(parts))], dim)
            return out

        return self._with(f"fuse({list(parts)}, {into!r}, dim={dim})", apply)

    def split(self, part: str, into: Sequence[str], *, dim: int = 0, sizes: Sequence[int] | None = None) -> Mapping:
        """Divide tensors with a part in their name into tensors with the parts `into`; evenly unless `sizes` say."""
        pattern = _part_of_name(part)

        def apply(tensors: Tensors) -> Tensors:
            out: Tensors = {}
            for name, tensor in tensors.items():
                if not pattern.search(name):
                    out[name] = tensor
                    continue
                length = tensor.shape[dim]
                shares = [length // len(into)] * len(into) if sizes is None else list(sizes)
                if sum(shares) != length or len(shares) != len(into):
                    raise WeightsLayoutError(
                        f"{name!r} has {length} rows in dimension {dim}, which cannot be split into {list(into)} of "
                        f"{shares}. Give `sizes`"
                    )
                for new, share in zip(into, torch.split(tensor, shares, dim), strict=True):
                    out[_replaced(pattern, new, name)] = share
            return out

        return self._with(f"split({part!r}, {list(into)}, dim={dim})", apply)

    def transpose(self, part: str, *, dim0: int = 0, dim1: int = 1) -> Mapping:
        """Exchange two dimensions of tensors with a part in their name."""
        pattern = _part_of_name(part)

        def apply(tensors: Tensors) -> Tensors:
            return {
                name: each.transpose(dim0, dim1) if pattern.search(name) else each for name, each in tensors.items()
            }

        return self._with(f"transpose({part!r}, {dim0}, {dim1})", apply)

    def _with(self, text: str, apply: Callable[[Tensors], Tensors]) -> Mapping:
        # What a loader expects is its own business; renaming before it would hide which names it has taken.
        if self.load is not None:
            raise ValueError(f"a recorded loader takes no rules, got {text}. Rename before the loader's own names")
        return replace(self, rules=(*self.rules, _NameRule(text, apply)))

    def __repr__(self) -> str:
        if self.load is not None:
            return f"Mapping.record({self.load!r})"
        return ".".join(["Mapping()", *(rule.text for rule in self.rules)])

    def recorded(self, stored: StoredLayout, targets: AnyMapping[str, torch.Tensor], *, subset: bool) -> Record:
        """Return what this mapping brings from a published layout into a reader's tensors.

        WeightsLayoutError for operations that cannot be recorded, and for tensors that do not fit.
        """
        load = self.load
        if load is not None:
            return record(lambda recorder: load(recorder.tensors()), stored, targets, subset=subset)
        return record(self._loader(stored, targets, subset=subset), stored, targets, subset=subset)

    def _ruled(self, tensors: Tensors) -> Tensors:
        for rule in self.rules:
            tensors = rule.apply(tensors)
        return tensors

    def _loader(
        self, stored: StoredLayout, targets: AnyMapping[str, torch.Tensor], *, subset: bool
    ) -> Callable[[LoadRecorder], None]:
        """Return the loader that the rules describe."""

        def load(recorder: LoadRecorder) -> None:
            tensors = self._ruled(dict(recorder.tensors()))
            if any(name not in tensors for name in targets):  # perhaps further names of tied tensors
                both = self._ruled(dict(recorder.tensors_of([*stored.tensors, *stored.same])))
                tensors |= {name: both[name] for name in targets if name in both and name not in tensors}
            surplus = [name for name in tensors if name not in targets]
            if surplus and not subset:
                raise WeightsLayoutError(
                    f"{self!r} makes {len(surplus)} tensors that the reader does not have: {listed(surplus)}; the "
                    f"reader has {listed(list(targets))}. Rename them, or pass subset=True"
                )
            for name, tensor in tensors.items():
                if name in targets:
                    if tensor.shape != targets[name].shape:
                        raise WeightsLayoutError(
                            f"{self!r} gives {name!r} the shape {tuple(tensor.shape)}, and the reader has "
                            f"{tuple(targets[name].shape)}"
                        )
                    targets[name].detach().copy_(tensor)

        return load


def layout_of_record(recorded: Record, stored: StoredLayout) -> dict[str, TensorLayout]:
    """Return the layout of what a reader takes: the boxes of its regions, by published name."""
    layout = {}
    for name, regions in recorded.regions.items():
        published = stored.tensors[name]
        held = tuple(HeldBox(region.box, (0,) * len(published.shape)) for region in regions)
        layout[name] = TensorLayout(published.shape, published.dtype, published.itemsize, held)
    return layout


def _part_of_name(part: str) -> re.Pattern[str]:
    return re.compile(rf"(?:(?<=\.)|^){re.escape(part)}(?=\.|$)")


def _replaced(pattern: re.Pattern[str], part: str, name: str) -> str:
    return pattern.sub(lambda _: part, name)
