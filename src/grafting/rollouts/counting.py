"""Cost in tokens and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counter:
    """Tokens generated, forwarded and backpropagated; padding does not count."""

    tokens_generated: int = 0
    tokens_forwarded: int = 0
    tokens_backpropagated: int = 0

    def add(self, tokens_generated: int = 0, tokens_forwarded: int = 0, tokens_backpropagated: int = 0) -> None:
        """Add to the counts."""
        self.tokens_generated += tokens_generated
        self.tokens_forwarded += tokens_forwarded
        self.tokens_backpropagated += tokens_backpropagated

    def cost(self, parameters: int) -> dict[str, int]:
        """The counts with FLOPs: 2 N per forwarded and 4 N per backpropagated token, N parameters."""
        flops = parameters * (2 * self.tokens_forwarded + 4 * self.tokens_backpropagated)
        return {
            "tokens_generated": self.tokens_generated,
            "tokens_forwarded": self.tokens_forwarded,
            "tokens_backpropagated": self.tokens_backpropagated,
            "flops": flops,
        }
