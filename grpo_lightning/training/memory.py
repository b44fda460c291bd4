"""What a step needs in memory, from the shapes alone, for one rank that holds the whole model.

With N weights of b bytes, N_t of them trained; M groups a micro-batch; T = M·(S + G·L) tokens in it; D layers of width h,
MLP width i and key/value width k:

===========  ==========================================================================================
weights      N·b
gradients    N_t·b
optimizer    2·N_t·b (AdamW's two moments, in the weights' type)
reference    N·b where KL is measured and the whole model is trained; 0 for LoRA, whose base is the reference
activations  T·D·(10·h + 4·i + 3.3·k)·b: what a Llama layer keeps for its backward pass
logits       3·M·G·L·V·4: the logits, their log-softmax and its gradient, float32
sampling     2·D·k·b·P·(S + G·L): keys and values, each prompt's once for its group
===========  ==========================================================================================

The factors of the activations are fitted to what autograd keeps (saved tensors counted by storage) over nine shapes of a
Llama; they hold within 15 % there. Sampling and the training pass do not happen at once: the greater counts.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StepMemory", "StepShape", "step_memory"]

_HIDDEN, _MLP, _KEYS = 10.0, 4.0, 3.3
_LOGIT_COPIES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """Sizes of a model and of a step on one rank."""

    parameters: int  # N
    trained: int  # N_t
    bytes_per_weight: int  # b
    layers: int  # D
    hidden: int  # h
    mlp: int  # i
    keys: int  # k, key heads x head width
    vocabulary: int  # V
    prompts: int  # P of this rank
    group_size: int  # G
    micro_groups: int  # M
    prompt_tokens: int  # S, the longest
    completion_tokens: int  # L, the limit
    reference_copy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """Bytes by what they are for."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    sampling: int

    @property
    def total(self) -> int:
        """The most at once."""
        held = self.weights + self.gradients + self.optimizer + self.reference
        return held + max(self.activations + self.logits, self.sampling)


def step_memory(shape: StepShape) -> StepMemory:
    """The bytes of a step; see the module's table."""
    b = shape.bytes_per_weight
    completion = shape.group_size * shape.completion_tokens
    tokens = shape.micro_groups * (shape.prompt_tokens + completion)
    kept = _HIDDEN * shape.hidden + _MLP * shape.mlp + _KEYS * shape.keys
    return StepMemory(
        weights=shape.parameters * b,
        gradients=shape.trained * b,
        optimizer=2 * shape.trained * b,
        reference=shape.parameters * b if shape.reference_copy else 0,
        activations=round(tokens * shape.layers * kept * b),
        logits=_LOGIT_COPIES * shape.micro_groups * completion * shape.vocabulary * 4,
        sampling=2 * shape.layers * shape.keys * b * shape.prompts * (shape.prompt_tokens + completion),
    )
