"""How much each tensor of a model moves the logprobs of a probe; by gradients, for all tensors at once.

With J the Jacobian of the probe's logprobs with respect to one tensor, and d a change of that tensor, the probe moves
by J d. One backward pass with a vector v over the probe's tokens gives v . J d for every tensor. So:

- `effects`: with random signs for v, the mean square of v . J d is the squared length of J d (Hutchinson's estimator),
  for all tensors in a few backward passes.
- `overlaps`: with the difference between two implementations for v, v . J d says how much of that difference looks as
  if d were missing.

A tied output head counts twice: within the embeddings it is tied to, and by itself under the name HEAD, since engines
may compute it from a copy of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from inference.weights.gather import unwrapped

HEAD = "the tied output head"

Change = Callable[[str], Tensor]
"""A tensor's change, by name."""


@dataclass(frozen=True, slots=True)
class TiedHead:
    """An output head that is tied to the input embeddings, whose parameter is called `name`."""

    module: nn.Module
    name: str

    @contextmanager
    def holding(self, weight: Tensor) -> Iterator[nn.Parameter]:
        """Let the head compute with another tensor for the `with` block, and yield that as its parameter."""
        tied = self.module.weight
        own = nn.Parameter(weight)
        self.module.weight = own
        try:
            yield own
        finally:
            self.module.weight = tied


def tied_head(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> TiedHead | None:
    """Return the model's output head if it is tied to one of `parameters`."""
    inner = unwrapped(model)
    plain = inner.get_base_model() if isinstance(inner, PeftModel) else inner
    if not isinstance(plain, PreTrainedModel):
        return None
    head = plain.get_output_embeddings()
    if head is None or "weight" not in head._parameters:
        return None
    name = next((name for name, parameter in parameters.items() if parameter is head.weight), None)
    is_tied = plain.get_input_embeddings().weight is head.weight
    return TiedHead(head, name) if is_tied and name is not None else None


def effects(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    logprobs: Callable[[], Tensor],
    change: Change,
    directions: int,
) -> dict[str, float]:
    """Estimate the root mean square, over the probe's tokens, of what each tensor's change does to their logprobs.

    `logprobs` computes them, shape (tokens,), with gradients. The square has a relative error of sqrt(2 / directions).
    """
    chance = torch.Generator().manual_seed(0)

    def signs(count: int) -> Sequence[Tensor]:
        return [torch.randint(0, 2, (count,), generator=chance).mul(2.0).sub(1.0) for _ in range(directions)]

    count, found = _products(model, parameters, logprobs, signs, change)
    return {name: (sum(p * p for p in products) / len(products) / count) ** 0.5 for name, products in found.items()}


def overlaps(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    logprobs: Callable[[], Tensor],
    change: Change,
    difference: Sequence[float],
) -> dict[str, float]:
    """Return the inner product, over the probe's tokens, of `difference` with what each tensor's change does."""
    _, found = _products(model, parameters, logprobs, lambda _: [torch.tensor(difference)], change)
    return {name: products[0] for name, products in found.items()}


def _products(
    model: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    logprobs: Callable[[], Tensor],
    vectors: Callable[[int], Sequence[Tensor]],
    change: Change,
) -> tuple[int, dict[str, list[float]]]:
    """Return the number of tokens, and for each tensor the inner product of its effect with each vector."""
    head = tied_head(model, parameters)
    found: dict[str, list[float]] = {name: [] for name in parameters}
    with ExitStack() as stack:
        leaves = dict(parameters)
        if head is not None:
            leaves[HEAD] = stack.enter_context(head.holding(parameters[head.name].detach()))
            found[HEAD] = []
        for leaf in leaves.values():
            stack.callback(leaf.requires_grad_, leaf.requires_grad)
            leaf.requires_grad_(True)
        with torch.enable_grad():
            values = logprobs()
        every = vectors(len(values))
        for index, vector in enumerate(every):
            gradients = torch.autograd.grad(
                values,
                list(leaves.values()),
                vector.to(values),
                retain_graph=index + 1 < len(every),
                allow_unused=True,
            )
            products = {
                name: 0.0
                if gradient is None
                else _inner(gradient, change(head.name if name == HEAD and head else name))
                for name, gradient in zip(leaves, gradients, strict=True)
            }
            if head is not None:
                products[head.name] += products[HEAD]
            for name, product in products.items():
                found[name].append(product)
    return len(values), found


def _inner(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.reshape(-1).float(), other.reshape(-1).float()))
