"""The proof that a push brings every tensor to the servers; no bound in it is a user's to choose.

Two implementations of one policy never agree to the last bit, and how far apart they are depends on the model's depth,
its dtype and its training. So nothing is compared with a fixed tolerance:

1. Noise. With the weights that both hold, how far are the server's logprobs from the trainer's?
2. Effect. Every tensor is changed by about as much as moves the logprobs, by itself, to SIGNAL times the noise that is
   left when it is averaged over the probe's tokens; all of it together stays so small that the policy behaves as
   before, and amplifies no rounding. The changed weights are pushed.
3. Verdict. The server must be nearer to the trainer with the changes than to the trainer without them, by a factor,
   and about as near as it was before. And no tensor's missing change may explain what is between them: that change's
   least-squares share in the difference is about 0 when the tensor arrived, about 1 when it stayed behind. Gradients
   (`sensitivity`) find the suspects among all tensors, forward passes without their changes decide (matching pursuit:
   the best explanation first, then what explains the rest). A tensor that is found so is looked at again on another
   sample: in 16 bits a dozen tokens make up the noise, and one of hundreds of tensors resembles it by chance.

A tensor whose change the probe cannot show, in front of the noise, is reported as such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from inference.weights.gather import is_shared_out
from inference.weights.perturb import Perturbation, direction, perturbed, pushed_parameters
from inference.weights.probe import gap
from inference.weights.sensitivity import HEAD, effects, overlaps, tied_head
from inference.weights.transport import WeightSyncError

PROBE_TEMPERATURE = 2.0
"""That a server generates probes at. A trained policy is sure of most of what it says, and what it is sure of shows no
change; at this temperature nearly every token does."""
PROOF_TOKENS = 128
"""That a server generates for each part of the proof. The noise of a tensor's share falls with their square root."""
SIGNAL = 24.0
"""A tensor's effect, in standard errors of its share: four times what a verdict needs, since effects are estimated, and
all of them together may be too much."""
LEAST_SIGNAL = 6.0
"""Standard errors from 0 that a share must have to count: noise alone gets there in one of 10^9 tensors."""
LEAST_EFFECT = 0.1
"""Of all changes together, in nats (root mean square): where there is no noise to speak of."""
LARGEST_EFFECT = 3.0
"""Of all changes together, in nats, as far as they are planned."""
LARGEST_MEAN_EFFECT = 1.0
"""Of all changes together, in nats: the mean, which single tokens do not dominate. A policy of 30 layers that is moved
by 1 nat rounds as before, one that is moved by 2.5 amplifies rounding by a half, one that is moved by 9 fourfold."""
UNMEASURED_SCALE = 0.05
"""Of each tensor's change where gradients are not to be had: a twentieth of the tensor moves a trained policy by about
a nat."""
SMALLEST_SCALE = 2.0**-7
"""A unit in the last place of bfloat16."""
LARGEST_SCALE = 2.0
"""Some tensors move little: the bias of keys, in a policy that attends to everything alike."""
FIRST_SCALE = 0.5
"""Of a tensor before its effect is known."""
LED_SCALE = 1.0
"""Of LoRA's A before its effect is known: by itself it moves nothing, and what B lets it move is to be as much as what
B does."""
REFINEMENTS = 2
"""Of the scales at most, each by what the last ones did."""
SETTLED = 2.0
"""By how much a refinement changes a scale at most when no further one is worth its backward passes."""
DIRECTIONS = 6
"""Random vectors per estimate of the effects."""
EFFECT_TOKENS = 64
"""Of the probe, that effects are estimated on: each vector costs a backward pass over them."""
NEARER = 2.5
"""How many times nearer the server must be to the changed weights than to the unchanged ones."""
NOISE_GROWTH = 6.0
"""How many times the noise may have grown with the changed weights: 3.2 times was measured, LoRA in bfloat16."""
HARMLESS = 1e-3
"""A difference, in nats, that changes no importance ratio by more than a thousandth; never an error."""
LACKING = (0.5, 2.0)
"""The shares between which a tensor stayed behind."""
FOLDS = 4
"""Parts of the probe, of which all but one must agree that a tensor stayed behind."""
CONCEALED = 6.0
"""How many times the whole difference a suspect's effect may be at most: a tensor that stayed behind makes a difference
of LACKING[0] times its effect or more, and effects are estimated to within a factor of three."""
SUSPECTS = 6
"""That are tried for one explanation: gradients rank tensors by estimates."""
MOST_NAMED = 3
_NOTHING = 1e-9

Logprobs = Callable[[tuple[int, ...], tuple[int, ...], float], Tensor]
"""The trainer's own logprobs of tokens after a prompt, at a temperature; shape (tokens,), as it computes them for the
loss, with gradients where they are enabled."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server generated after the probe's prompt."""

    url: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a push of changed weights showed at one server; root mean squares over the probe's tokens, in nats.

    `noise` is how far trainer and server are apart with the weights that both hold, `with_changes` and
    `without_changes` how far the server is from the trainer with the changed weights and with the others. `lacking` are
    the tensors that stayed behind, `unseen` those of which the probe shows nothing.
    """

    url: str
    noise: float
    with_changes: float
    without_changes: float
    weakest: float
    """The smallest effect of a tensor that the probe shows, in standard errors of its share."""
    lacking: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.url}: noise {self.noise:.2g} nats, {self.with_changes:.2g} with the weights that prove the push; "
            f"their effect {self.without_changes:.2g}, the least visible tensor at {self.weakest:.3g} standard errors"
        )

    def complaint(self) -> str:
        """Return "" when the push brought everything, else a sentence."""
        measured = (
            f"logprobs differ by {self.with_changes:.3g} from the trainer's with the weights that were pushed to prove "
            f"it, by {self.without_changes:.3g} from those with the weights of before, and by {self.noise:.3g} where "
            "both hold the same"
        )
        if self.lacking:
            more = ", and perhaps more" if len(self.lacking) == MOST_NAMED else ""
            return f"it keeps what it had of {', '.join(self.lacking)}{more}; {measured}"
        if self.with_changes * NEARER > self.without_changes:
            return measured
        if self.with_changes > max(HARMLESS, NOISE_GROWTH * self.noise):
            return f"part of the weights did not arrive; {measured}"
        return ""


def plan_scales(moved: Mapping[str, float], scales: Mapping[str, float], noise: float, tokens: int) -> dict[str, float]:
    """Return by how much to scale each tensor's direction, when at `scales` each moves the logprobs by `moved` nats.

    What moves nothing keeps its scale. Raises WeightSyncError when the noise is so large that nothing could be proved.
    """
    count = len(scales)
    smallest = noise / math.sqrt(tokens)
    effect = max(SIGNAL * smallest, LEAST_EFFECT / math.sqrt(count))
    effect = min(effect, LARGEST_EFFECT / math.sqrt(count))
    if effect < LEAST_SIGNAL * smallest:
        raise WeightSyncError(
            f"logprobs differ by {noise:.3g} (root mean square) where both should hold the same weights: too much to "
            "prove a push with, or to train on"
        )
    return {
        name: scale if moved[name] < _NOTHING else min(LARGEST_SCALE, max(SMALLEST_SCALE, scale * effect / moved[name]))
        for name, scale in scales.items()
    }


def _is_led(name: str) -> bool:
    return "lora_A" in name or "lora_embedding_A" in name


class Prover:
    """The trainer's side of the proof: its model, and what it makes of a server's samples.

    `logprobs` are the model's own, after `prompt`, as it trains; `unrounded` are those without autocast: in 16 bits,
    what massive activations round away drowns a gradient. The weights that a push carries are changed only within
    `perturb.perturbed`, by `scales`.
    """

    def __init__(
        self,
        model: nn.Module,
        logprobs: Logprobs,
        unrounded: Logprobs,
        prompt: tuple[int, ...],
        *,
        trainable_only: bool,
    ) -> None:
        self._model = model
        self._logprobs = logprobs
        self._unrounded = unrounded
        self._prompt = prompt
        self._trainable_only = trainable_only
        # Of a sharded model, what is a parameter changes with each forward pass.
        self._parameters = {} if is_shared_out(model) else pushed_parameters(model, trainable_only=trainable_only)

    def distance(self, sample: Sample) -> float:
        """Return how far what a server generated is from the trainer with its weights of now, in nats.

        The root mean square over the tokens. Raises WeightSyncError.
        """
        return gap(self._values(sample), sample.logprobs).rms

    def scales(self, sample: Sample, noise: float) -> dict[str, float] | float:
        """Return by how much to change each tensor. Raises WeightSyncError."""
        if is_shared_out(self._model):
            return UNMEASURED_SCALE
        tokens = len(sample.token_ids)
        at_first = {name: parameter.detach() for name, parameter in self._parameters.items()}
        unchanged = self._values(sample)
        scales = {name: LED_SCALE if _is_led(name) else FIRST_SCALE for name in self._parameters}
        moved = self._effects(sample, lambda name: scales[name] * direction(name, at_first[name]))
        scales = plan_scales(moved, scales, noise, tokens)
        for _ in range(REFINEMENTS):
            # Measured again where they will be: what multiplies a tensor has changed by then, LoRA's B from 0 for one.
            with perturbed(self._model, scales, trainable_only=self._trainable_only) as changes:
                moved = self._effects(sample, changes.change)
            last, scales = scales, plan_scales(moved, scales, noise, tokens)
            if all(1 / SETTLED < scales[name] / last[name] < SETTLED for name in scales):
                break
        with perturbed(self._model, scales, trainable_only=self._trainable_only):
            together = gap(unchanged, self._values(sample)).differences
        too_much = max(1.0, fmean(map(abs, together)) / LARGEST_MEAN_EFFECT)
        return {
            name: scale if _is_led(name) else max(SMALLEST_SCALE, scale / too_much) for name, scale in scales.items()
        }

    def examine(self, sample: Sample, noise: float, changes: Perturbation) -> Evidence:
        """Compare what a server generated with the changed weights, while they are changed. Raises WeightSyncError.

        `without_changes` is left at infinity: it is the `distance` once the changes are undone.
        """
        found = gap(self._values(sample), sample.logprobs)
        if is_shared_out(self._model):
            return Evidence(sample.url, noise, found.rms, math.inf, math.inf)
        effect = self._effects(sample, changes.change)
        smallest = noise / math.sqrt(len(sample.token_ids))
        signal = {name: moved / max(smallest, 1e-12) for name, moved in effect.items()}
        unseen = tuple(name for name, value in signal.items() if value < LEAST_SIGNAL)
        most = CONCEALED * found.rms
        candidates = {name: moved for name, moved in effect.items() if smallest < moved < most}
        lacking: list[str] = []
        differences: Sequence[float] = found.differences
        while candidates and len(lacking) < MOST_NAMED:
            explanation = self._explain(sample, found.ours, differences, candidates, changes)
            if explanation is None:
                break
            name, differences = explanation
            lacking.append(name)
            del candidates[name]
        return Evidence(
            sample.url,
            noise,
            found.rms,
            math.inf,
            weakest=min(set(signal.values()) - {signal[name] for name in unseen}, default=0.0),
            lacking=tuple(lacking),
            unseen=unseen,
        )

    def confirmed(self, sample: Sample, names: Sequence[str], changes: Perturbation) -> tuple[str, ...]:
        """Return which of the tensors stayed behind by another sample, too, than the one that they were found by.

        While the weights are changed. Raises WeightSyncError.
        """
        found = gap(self._values(sample), sample.logprobs)
        fits = {name: _fit(found.differences, found.ours, self._without(name, sample, changes)) for name in names}
        return tuple(name for name, fit in fits.items() if LACKING[0] < fit.share < LACKING[1])

    def _explain(
        self,
        sample: Sample,
        ours: Sequence[float],
        differences: Sequence[float],
        effect: Mapping[str, float],
        changes: Perturbation,
    ) -> tuple[str, list[float]] | None:
        """Return the tensor whose missing change explains most of `differences`, and what it leaves unexplained."""
        found = overlaps(
            self._model,
            self._parameters,
            self._differentiable(sample.token_ids),
            changes.change,
            differences,
        )
        # A change that is missing shows with the opposite sign.
        explained = {name: found[name] ** 2 / moved**2 for name, moved in effect.items() if found[name] < 0}
        suspects = sorted(explained, key=lambda name: -explained[name])[:SUSPECTS]
        tried = [(name, _fit(differences, ours, self._without(name, sample, changes))) for name in suspects]
        name, best = min(tried, key=lambda one: one[1].rest_square, default=("", None))
        return (name, best.rest) if best is not None and best.is_lacking else None

    def _without(self, name: str, sample: Sample, changes: Perturbation) -> list[float]:
        """Return the logprobs of a trainer that lacks one tensor's change."""
        if name == HEAD and (head := tied_head(self._model, self._parameters)) is not None:
            with head.holding(changes.original(head.name)):
                return self._values(sample)
        with changes.left_behind(name):
            return self._values(sample)

    def _values(self, sample: Sample) -> list[float]:
        with torch.no_grad():
            found: list[float] = self._logprobs(self._prompt, sample.token_ids, PROBE_TEMPERATURE).tolist()
        return found

    def _effects(self, sample: Sample, change: Callable[[str], Tensor]) -> dict[str, float]:
        logprobs = self._differentiable(sample.token_ids[:EFFECT_TOKENS])
        return effects(self._model, self._parameters, logprobs, change, DIRECTIONS)

    def _differentiable(self, token_ids: tuple[int, ...]) -> Callable[[], Tensor]:
        return lambda: self._unrounded(self._prompt, token_ids, PROBE_TEMPERATURE)


@dataclass(frozen=True, slots=True)
class _Fit:
    """How much of a tensor's missing change is in the differences: of all tokens, and of each of FOLDS parts."""

    share: float
    error: float
    folds: tuple[float, ...]
    rest: list[float]

    @property
    def rest_square(self) -> float:
        return math.fsum(value * value for value in self.rest)

    @property
    def is_lacking(self) -> bool:
        """Whether the tensor stayed behind. A token that stands out, as some do in 16 bits, is in one part alone."""
        inside = [LACKING[0] < share < LACKING[1] for share in (self.share, *self.folds)]
        return inside[0] and sum(inside) >= FOLDS and self.share > LEAST_SIGNAL * self.error


def _fit(differences: Sequence[float], ours: Sequence[float], without: Sequence[float]) -> _Fit:
    """Fit by least squares."""
    missing = [there - here for here, there in zip(ours, without, strict=True)]
    share, square = _share(differences, missing)
    folds = tuple(_share(differences[fold::FOLDS], missing[fold::FOLDS])[0] for fold in range(FOLDS))
    rest = [d - share * m for d, m in zip(differences, missing, strict=True)]
    error = math.sqrt(math.fsum(value * value for value in rest) / len(rest) / square) if square else math.inf
    return _Fit(share, error, folds, rest)


def _share(differences: Sequence[float], missing: Sequence[float]) -> tuple[float, float]:
    """Return the share, and the square of what is missing."""
    square = math.fsum(value * value for value in missing)
    return math.fsum(d * m for d, m in zip(differences, missing, strict=True)) / (square or 1.0), square
