from __future__ import annotations

import torch

from megarl.trainer.metrics import Reducer, combine, masked_mean, to_floats


def test_a_metric_is_reduced_by_its_reducer_and_never_by_a_part_of_its_name() -> None:
    """Names with min and max inside are means when they are declared means."""
    names = ("val/minerva_acc", "actor/nominal", "actor/max_entropy_coef")
    reducers: dict[str, Reducer] = dict.fromkeys(names, "mean")
    parts = [{n: masked_mean(torch.tensor([v]), torch.ones(1)) for n in names} for v in (0.0, 1.0)]
    assert to_floats(combine(parts, reducers), reducers) == dict.fromkeys(names, 0.5)


def test_padding_rows_do_not_dilute_a_mean() -> None:
    """Three tokens of KL .4 and one of padding: .4, not .3."""
    kl = masked_mean(torch.tensor([0.4, 0.4, 0.4, 0.0]), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    assert float(kl[0] / kl[1]) == torch.tensor(0.4).double()
