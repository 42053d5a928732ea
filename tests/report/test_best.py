import numpy as np
import pytest
from made_up_reports import figure

from quantkit.report.statistics import best, student_t

RANDOM = np.random.default_rng(0)
COMMON = RANDOM.normal(100, 30, 12)  # what is hard for all copies


def judged(name, windows):
    """A mean over 12 windows of 10 positions, whose own error is large."""
    return figure(name, float(windows.sum()) / 120, sums=windows, stderr=1.0, n=120)


def test_what_all_find_hard_falls_out_and_it_has_to_beat_every_other():
    """The means differ by a tenth of their errors, in every window alike."""
    one, two = (judged("kld", COMMON + shift + RANDOM.normal(0, 0.2, 12)) for shift in (0.0, 1.0))
    assert best([two, one]) == 1
    assert best([one, two]) == 0
    assert best([one, None, two]) == 0
    # A difference of some windows is luck.
    shift = np.zeros(12)
    shift[0] = 12.0
    assert best([judged("kld", COMMON), judged("kld", COMMON + shift)]) is None
    one, other, third = (judged("perplexity", COMMON + shift) for shift in (0.0, RANDOM.normal(0, 1, 12), 5.0))
    assert best([one, third]) == 0
    assert best([one, other, third]) is None


def test_other_windows_are_not_paired():
    one, other = judged("kld", COMMON), judged("kld", COMMON + 1)
    assert best([one, other.model_copy(update={"sums": other.sums[:-1]})]) is None
    assert best([one, other.model_copy(update={"n": 119})]) is None
    # And three windows are too few.
    assert best([figure("kld", 1.0, n=3, sums=[1, 1, 1]), figure("kld", 9.0, n=3, sums=[9, 9, 9.5])]) is None
    assert best([figure("kld", 1.0, n=4, sums=[1] * 4), figure("kld", 9.0, n=4, sums=[9, 9, 9.5, 9])]) == 0


def test_which_way_is_better():
    for name, expected in (("same_top_p", 1), ("kld", 0), ("perplexity", 0)):
        assert best([judged(name, COMMON), judged(name, COMMON + 1 + RANDOM.normal(0, 0.1, 12))]) == expected
    for name, expected in (("pp512@2", 1), ("tg128@1", 1), ("ms_per_token@1", 0), ("answers_tokens_per_second@1", 1)):
        assert best([figure(name, 10, stderr=0.1, n=5), figure(name, 12, stderr=0.1, n=5)]) == expected


def test_repeats_are_compared_by_both_errors_and_students_t():
    """2.776 * sqrt(0.1^2 + 0.1^2) = 0.393 for five repeats."""
    for gap, expected in ((0.41, 0), (0.38, None)):
        figures = [figure("ms_per_token@1", 10 + more, stderr=0.1, n=5) for more in (0, gap)]
        assert best(figures) == expected
    for freedom, table in ((3, 3.182), (4, 2.776), (15, 2.131), (60, 2.000)):
        assert student_t(freedom) == pytest.approx(table, abs=6e-4)


def test_sizes_are_exact_and_others_without_an_error_are_not_compared():
    assert best([figure("weight_bytes", 101), figure("weight_bytes", 100)]) == 1
    assert best([figure("weight_bytes", 100), figure("weight_bytes", 100)]) is None
    assert best([figure("peak_rss_bytes", 1), figure("peak_rss_bytes", 2)]) is None
    assert best([None, None]) is None
