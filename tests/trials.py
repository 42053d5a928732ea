"""A job and one run of it, for tests that call the parts of a conversion themselves."""

from dataclasses import dataclass, replace

import torch

from quantkit.checkpoints.rows import Rows
from quantkit.contracts.method import CheckedJob
from quantkit.contracts.registry import find_format
from quantkit.contracts.run import Checked, Run
from quantkit.contracts.stored import open_stored, stored_values
from quantkit.conversion.check import prepare
from quantkit.records.recipe import ConvertRecipe


@dataclass
class Trial:
    """`job` is the checked one once `check` was called; what the work finds out is in `run`."""

    job: CheckedJob
    run: Run

    @property
    def folder(self):
        return self.run.folder

    @property
    def source(self):
        return self.job.source

    @property
    def notes(self):
        return [*self.job.checked.notes, *self.run.findings.notes.values()]

    @property
    def tensor_types(self):
        return self.run.findings.tensor_types

    def check(self):
        """Let the method check the job; the job with what it says."""
        self.job = replace(self.job, checked=self.job.method.check(self.job))
        return self.job

    def write(self):
        """Let the method write a checked job into the folder, beside the side files."""
        self.folder.mkdir(exist_ok=True)
        self.source.copy_side_files(self.folder)
        self.job.method.write(self.job, self.run)


def trial_of(job, folder):
    """A trial that is not checked yet."""
    return Trial(CheckedJob.of(job, Checked(None)), Run(folder))


def prepared(model, method, bits, folder, kind=None, **options):
    """A trial that is not checked yet, of the format `kind`."""
    recipe = ConvertRecipe(model=str(model), method=method, bits=bits, format=kind, options=options)
    return trial_of(prepare(recipe), folder)


def read_back(artifact):
    """All tensors of an artifact by name, as its format reads them."""
    return dict(stored_values(open_stored(artifact, find_format(artifact.manifest.format))))


def read_all(kind, folder):
    """Read every tensor of a folder of that format; its reader."""
    reader = find_format(kind).open(folder, ("model.safetensors",), {})
    for name in reader.names():
        reader.read(name)
    return reader


def dense(stored):
    """What a format gives back, as one tensor."""
    if isinstance(stored, Rows):
        return torch.from_numpy(stored.whole())
    return stored if isinstance(stored, torch.Tensor) else stored.dense()


def dense_values(artifact):
    """All tensors of an artifact by name, dense."""
    return {name: dense(stored) for name, stored in read_back(artifact).items()}
