"""The sizes that are measured, and arrays of these sizes.

Axis legend: T tokens, d width, f expert width, E experts, k choices per token.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

ROUTINGS = ("uniform", "skewed")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One mixture-of-experts layer.

    Attributes:
      name: short, for tables.
      tokens, width, expert_width, experts, k: T, d, f, E, k.
    """

    name: str
    tokens: int
    width: int
    expert_width: int
    experts: int
    k: int

    @property
    def assignments(self) -> int:
        """T*k, the rows that the experts compute together."""
        return self.tokens * self.k

    @property
    def flops(self) -> int:
        """Of the forward pass: two products [d, f] for each assignment; the router not counted."""
        return 4 * self.assignments * self.width * self.expert_width

    @property
    def swiglu_width(self) -> int:
        """Expert width at which three matrices cost what two of width f do, up to one percent.

        The nearest multiple of 8: torch.nn.functional.grouped_mm wants rows of 16 bytes.
        """
        return max(8, 8 * round(2 * self.expert_width / 3 / 8))


CPU_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("a", 4096, 256, 512, 8, 2),
        Shape("b", 2048, 512, 2048, 16, 2),
        Shape("c", 1024, 768, 3072, 64, 2),
        Shape("d", 4096, 352, 704, 16, 2),
    )
}
# The first three are MegaBlocks' MoE-XS, MoE-Small and a wider one (Gale et al. 2022,
# arXiv:2211.15841), the last has few and large experts.
ACCELERATOR_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("xs", 65536, 512, 2048, 64, 1),
        Shape("small", 32768, 768, 3072, 64, 1),
        Shape("medium", 8192, 1024, 4096, 64, 1),
        Shape("large", 8192, 4096, 16384, 4, 1),
    )
}
QUICK_SHAPES = {"quick": Shape("quick", 128, 32, 48, 4, 2)}


class Inputs(NamedTuple):
    """Arrays float32, the same for every contender.

    Attributes:
      x: [T, d].
      cotangent: [T, d], the gradient that arrives at the output.
      router: [d, E].
      experts: "w_in" [E, d, f], "w_out" [E, f, d], two matrices for GELU.
      swiglu: likewise with "w_gate", at ``Shape.swiglu_width``.
    """

    x: np.ndarray
    cotangent: np.ndarray
    router: np.ndarray
    experts: dict[str, np.ndarray]
    swiglu: dict[str, np.ndarray]


def make_inputs(shape: Shape, routing: str, seed: int = 0) -> Inputs:
    """Random tokens and weights. The weights do not depend on the routing.

    Args:
      shape: sizes.
      routing: "uniform": the logits of all experts have one distribution. "skewed": expert 0 is the
        first choice of exactly half of the tokens.
      seed: of all arrays.

    Raises:
      ValueError: unknown routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"routing: got {routing!r}; allowed: {', '.join(ROUTINGS)}")
    generator = np.random.default_rng(seed)

    def normal(*size):
        # 1 / sqrt(fan-in), so that numbers stay near 1 in any dtype.
        return generator.standard_normal(size, np.float32) / np.float32(size[-2] ** 0.5)

    tokens, width, experts = shape.tokens, shape.width, shape.experts
    x = generator.standard_normal((tokens, width), np.float32)
    cotangent = generator.standard_normal((tokens, width), np.float32)
    router = normal(width, experts)
    if routing == "skewed":
        # Feature 0 alone decides the logit of expert 0: 6 in every second token and -6 in the rest,
        # while those of the other experts are normal with variance 1.
        x[:, 0] = np.where(np.arange(tokens) % 2 == 0, 2.0, -2.0)
        router[0], router[:, 0], router[0, 0] = 0.0, 0.0, 3.0

    def weights(width_in, names):
        sizes = {"w_out": (experts, width_in, width)}
        return {name: normal(*sizes.get(name, (experts, width, width_in))) for name in names}

    gelu = weights(shape.expert_width, ("w_in", "w_out"))
    swiglu = weights(shape.swiglu_width, ("w_in", "w_gate", "w_out"))
    return Inputs(x, cotangent, router, gelu, swiglu)


def growth_shapes(quick: bool) -> dict[str, list[Shape]]:
    """Series in which one size grows: T, E at fixed T*k, and k."""
    base = Shape("", 128, 32, 48, 4, 2) if quick else Shape("", 4096, 256, 512, 8, 2)
    tokens = (128, 256) if quick else (1024, 2048, 4096, 8192)
    experts = (4, 8) if quick else (8, 16, 32, 64, 128)
    choices = (1, 2) if quick else (1, 2, 4, 8)

    def series(field, values):
        return [dataclasses.replace(base, name=f"{field}={v}", **{field: v}) for v in values]

    return {
        "tokens": series("tokens", tokens),
        "experts": series("experts", experts),
        "k": series("k", choices),
    }
