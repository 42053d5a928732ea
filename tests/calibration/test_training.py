"""The held-out loop by hand: which sequences, in which order, what is kept, and when it ends."""

from collections.abc import Iterator

import pytest
import torch

from quantkit.calibration.training import HeldOut, train


class Student:
    """Writes down what it is asked for; `losses` are its held-out losses in order."""

    def __init__(self, losses: Iterator[float]) -> None:
        self.losses, self.now = losses, 0.0
        self.measured: list[list[int]] = []
        self.steps: list[list[int]] = []
        self.best: list[int] = []  # how many steps were done whenever the state was kept
        self.reports: list[tuple[float, float]] = []

    def measure(self, sequences: list[int]) -> float:
        if sequences[0] == 3:
            self.now = next(self.losses)
        self.measured.append(sequences)
        return self.now

    def step(self, number: int, sequences: list[int], first: float) -> None:
        assert (number, first) == (len(self.steps), 8.0)
        self.steps.append(sequences)


def trained(losses: list[float], steps: int, patience: int | None = None) -> Student:
    student = Student(iter(losses))
    train(
        12,
        2,
        steps,
        HeldOut(4, 3, patience),
        7,
        measure=student.measure,
        step=student.step,
        keep=lambda: student.best.append(len(student.steps)),
        report=lambda first, best: student.reports.append((first, best)),
    )
    return student


def test_batches_are_drawn_from_what_is_not_held_out_until_too_few_are_left() -> None:
    student = trained([8.0] * 9, 10)
    trained_on = [0, 1, 2, 4, 5, 6, 8, 9, 10]
    generator = torch.Generator().manual_seed(7)
    want: list[list[int]] = []
    for _ in range(3):
        order = [trained_on[i] for i in torch.randperm(9, generator=generator).tolist()]
        want += [order[start : start + 2] for start in range(0, 8, 2)]
    assert student.steps == want[:10]
    # Measured at first, after every third step, and at the end; the last part of the held-out ones is smaller.
    assert student.measured == [[3, 7], [11]] * 5


def test_the_state_with_the_least_held_out_loss_is_kept() -> None:
    student = trained([8.0, 5.0, 6.0, 4.0, 4.0], 12)
    assert student.best == [3, 9]
    assert student.reports == [(8.0, 8.0)] * 2 + [(8.0, 5.0)] * 6 + [(8.0, 4.0)] * 4


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([8.0, 9.0, 9.0, 9.0, 9.0], 15),  # two in a row at step 6 already, but half of the steps only then
        ([8.0, 9.0, 9.0, 9.0, 7.0, 9.0], 18),
        ([8.0, *(7.0 - i for i in range(10))], 29),
    ],
)
def test_patience_ends_training_in_its_second_half(losses: list[float], steps: int) -> None:
    assert len(trained(losses + [9.0] * 9, 29, patience=2).steps) == steps
