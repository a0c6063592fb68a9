"""The worker's counterpart of the admission gate: the one job runs at the width that was planned for it.

Width 1 is the serial B1 path, called directly. A wider plan is carried out by the executor that is installed;
without one it is an error, never a job that runs narrower than planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from worker.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a plan is made from. speculation: as in the job; prompt, budget: how many ids."""

    speculation: str
    prompt: int
    budget: int


@dataclass(frozen=True, slots=True)
class WidthPlan:
    """width: the most rows that a forward of the job may have. why: in words, where it is 1."""

    width: int
    why: str = ""


SINGLE: Final = WidthPlan(1, "no width executor is installed")


class WidthError(RuntimeError):
    """A plan wider than 1, and nobody to carry it out."""


class WideEngine(Engine, Protocol):
    """Runs a job whose forwards may have several rows. width: those of the latest one."""

    width: int


class WidthExecutor(Protocol):
    """Plans and runs widths above 1."""

    def plan(self, meta: Meta) -> WidthPlan:
        """The width of a job."""

    def run(self, plan: WidthPlan, singleton: Engine) -> WideEngine:
        """What runs one job at that width over the serial B1 path *singleton*."""


class WidthGate:
    """One job after the other, each at its width."""

    def __init__(self, singleton: Engine, executor: WidthExecutor | None = None) -> None:
        self.singleton = singleton
        self.executor = executor
        self._wide: WideEngine | None = None

    @property
    def width(self) -> int:
        """Rows of the latest decode forward of the job that runs, or ran last."""
        return 1 if self._wide is None else self._wide.width

    def plan(self, meta: Meta) -> WidthPlan:
        """The width of a job: 1 where no executor is installed."""
        return SINGLE if self.executor is None else self.executor.plan(meta)

    def engine(self, plan: WidthPlan) -> Engine:
        """What runs a job of this plan.

        Raises:
            WidthError: the plan is wider than 1 and no executor is installed.
        """
        self._wide = None
        if plan.width == 1:
            return self.singleton
        if self.executor is None:
            raise WidthError(f"a plan of width {plan.width} needs a width executor, and none is installed")
        self._wide = self.executor.run(plan, self.singleton)
        return self._wide
