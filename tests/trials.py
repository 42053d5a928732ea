"""A job and one run of it, for tests that call the parts of a conversion themselves."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.contracts.method import Job
from quantkit.contracts.run import Run
from quantkit.models.source import Source


@dataclass
class Trial:
    """`job` is the checked one once `check` was called; what the work finds out is in `run`."""

    job: Job
    run: Run

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.run.folder

    @property
    def source(self) -> Source:
        """The job's."""
        return self.job.source

    @property
    def notes(self) -> list[str]:
        """Those of the check and those of the work."""
        return [*self.job.checked.notes, *self.run.findings.notes.values()]

    @property
    def tensor_types(self) -> dict[str, int]:
        """How many tensors were stored as what."""
        return self.run.findings.tensor_types

    def check(self) -> Job:
        """Let the method check the job; the job with what it found."""
        self.job = self.job.changed(checked=self.job.method.check(self.job))
        return self.job

    def write(self) -> None:
        """Let the method write a checked job into the folder."""
        self.job.method.write(self.job, self.run)
