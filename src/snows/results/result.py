"""What `snows.prune` returns, and how it is written into a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from ..data.compact import pack_masks, pack_state
from ..data.samples import check_flag
from ..data.tensors import spoilt
from ..data.weights import write_tensors
from ..devices.distributed.group import writes_files
from ..errors import InputError
from ..reading import as_path
from ..recipe import Recipe
from ..version import __version__
from .files import CannotWriteError, new_folder, rescued
from .folder import versions
from .html import render
from .manifest import COMPACT, MANIFEST, MASKS, MODEL, PAGE, PROBE, RECIPE, REPORT, file_facts, render_manifest
from .probe import Call, record
from .report import Report
from .storage import refuse_existing
from .summary import one_line


@dataclass(frozen=True, repr=False)
class Result:
    """A pruned model, its masks, and the report of how it was made.

    Attributes:
        model: The pruned model: a copy of the user's one, with exact zeros where weights are removed.
        masks: By parameter name. True where a weight is kept.
        report: Figures of the run.
        recipe: The choices of the run.
        source: The name that the dense model was built from, if it has one: `snows.load` can build it again.
        probe: Arguments of a call of the model. They are saved with its answers, which `snows.verify` compares.

    Example:
        >>> import torch, snows
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
        >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
        >>> {name: int(mask.sum()) for name, mask in result.masks.items()}
        {'0.weight': 32}
        >>> result
        <Result: Sequential pruned to 2:4, 1 layer, 50.0 % removed; summary() tells more>
    """

    model: nn.Module
    masks: dict[str, Tensor]
    report: Report
    recipe: Recipe
    source: str | None = None
    probe: Call | None = None

    def __repr__(self) -> str:
        return f"<Result: {one_line(self.report.to_dict())}; summary() tells more>"

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def summary(self) -> str:
        """The headline of the report, a table of its layers, and which of them to look at, as text."""
        return self.report.summary()

    def save(self, directory: str | Path, *, compact: bool = False, force: bool = False) -> Path:
        """Write weights, masks and probe as safetensors, the rest as JSON and HTML, into a new folder.

        The folder appears at the end, complete. Saving the same result again writes the same bytes.

        Args:
            directory: A folder that does not exist, or is empty.
            compact: Store kept weights only, in a smaller file that `snows.load` expands.
            force: Replace the folder if it holds a saved result and nothing else.

        Of several processes that pruned together, the first one writes; the others return at once.

        Returns:
            The folder.

        Raises:
            InputError: The folder holds something else, or cannot be written: then the result is in a temporary folder,
                which the message names. Or the model was changed after pruning: it is not zero where its masks remove
                weights.

        Example:
            >>> import tempfile, torch, snows
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
            >>> result = snows.prune(model, torch.randn(64, 8), "2:4", layers="0", progress=False)
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     sorted(path.name for path in result.save(f"{folder}/pruned").iterdir())[:3]
            ['manifest.json', 'masks.safetensors', 'model.safetensors']
        """
        directory = as_path(directory, "directory")
        check_flag("compact", compact)
        check_flag("force", force)
        if not writes_files():
            return directory
        refuse_existing(directory, force)
        try:
            with new_folder(directory) as folder:
                self._write(folder, compact)
        except CannotWriteError as error:
            raise rescued(error, lambda folder: self._write(folder, compact)) from error
        return directory

    def _write(self, folder: Path, compact: bool) -> None:
        masks = {name: mask.cpu().bool() for name, mask in self.masks.items()}
        self._write_weights(folder, masks, compact)
        _write_tensors(folder / MASKS, *pack_masks(masks))
        recorded = None if self.probe is None else record(self.model, self.probe)
        if recorded is not None:
            _write_tensors(folder / PROBE, *recorded)
        report = self.report.to_dict()
        data = json.dumps({"source": self.source, **report}, indent=2, allow_nan=False)
        (folder / REPORT).write_text(data, encoding="utf-8")
        (folder / PAGE).write_text(render(report), encoding="utf-8")  # the folder appears whole, and its files with it
        (folder / RECIPE).write_text(self.recipe.to_json(), encoding="utf-8")
        facts = {path.name: file_facts(path) for path in folder.iterdir()}
        (folder / MANIFEST).write_text(render_manifest(facts, versions()), encoding="utf-8")

    def _write_weights(self, folder: Path, masks: Mapping[str, Tensor], compact: bool) -> None:
        bad = spoilt(self.model)
        if bad:
            raise InputError(
                f"the model's weights contain NaN or infinity (in {', '.join(bad[:3])}), so the result was changed "
                "after pruning; nothing is saved"
            )
        own = {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        tied = _tied_names(own)
        state = _exact_state(own, masks, tied)
        if compact:
            _write_tensors(folder / COMPACT, *pack_state(state, masks, tied))
        else:
            _write_tensors(folder / MODEL, state, {})


def save_or_rescue(result: Result, directory: Path, compact: bool, force: bool) -> None:
    """Save at the end of a command, where the result would be lost if somebody took the folder meanwhile."""
    if not writes_files():
        return
    try:
        refuse_existing(directory, force)
    except InputError as error:
        raise rescued(error, lambda folder: result._write(folder, compact)) from error
    result.save(directory, compact=compact, force=force)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    write_tensors(path, tensors, {"format": "pt", "snows": __version__, **metadata})


def _tied_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that share all their memory with a tensor of an earlier name, with that name."""
    seen: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else name
        if seen.setdefault(memory, name) != name:
            tied[name] = seen[memory]
    return tied


def _exact_state(own: Mapping[str, Tensor], masks: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    """A copy on the CPU with +0.0 wherever a mask removes. Tied weights are copied for each of their names."""
    kept = {tied.get(name, name): mask for name, mask in masks.items()}
    state: dict[str, Tensor] = {}
    for name, tensor in own.items():
        state[name] = tensor.cpu().clone().contiguous()
        mask = kept.get(tied.get(name, name))
        if mask is None:
            continue
        if bool(state[name][~mask].any()):
            raise InputError(
                f"{name} is not zero where its mask removes it, so the result was changed after pruning; multiply it "
                "by its mask first"
            )
        state[name][~mask] = 0  # a negative weight times zero is -0.0
    return state
