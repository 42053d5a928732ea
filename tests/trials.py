"""A job and one run of it, for tests that call the parts of a conversion themselves."""

from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.artifact import Artifact
from quantkit.checkpoints.rows import Rows
from quantkit.contracts.format import Stored
from quantkit.contracts.method import Job
from quantkit.contracts.registry import find_format
from quantkit.contracts.run import Run
from quantkit.contracts.stored import open_stored, stored_values
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
        """Let the method check the job; the job with what it says."""
        self.job = self.job.changed(checked=self.job.method.check(self.job))
        return self.job

    def write(self) -> None:
        """Let the method write a checked job into the folder."""
        self.job.method.write(self.job, self.run)


def read_back(artifact: Artifact) -> dict[str, Stored]:
    """All tensors of an artifact by name, as its format reads them."""
    return dict(stored_values(open_stored(artifact, find_format(artifact.manifest.format))))


def dense(stored: Stored) -> torch.Tensor:
    """What a format gives back, as one tensor."""
    if isinstance(stored, Rows):
        return torch.from_numpy(stored.whole())
    return stored if isinstance(stored, torch.Tensor) else stored.dense()


def dense_values(artifact: Artifact) -> dict[str, torch.Tensor]:
    """All tensors of an artifact by name, dense."""
    return {name: dense(stored) for name, stored in read_back(artifact).items()}
