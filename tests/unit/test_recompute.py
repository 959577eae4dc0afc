"""Who recomputes activations: LLM and encoders, together or apart."""

import pytest

from omni_ds.composition import encoders_recompute, recomputes
from omni_ds.config import validate
from tests.tiny import config_dict


@pytest.mark.parametrize(
    ("interval", "encoders", "expected"),
    [
        (0, "auto", (False, False)),
        (1, "auto", (True, True)),
        (0, True, (False, True)),
        (1, False, (True, False)),
    ],
)
def test_encoders_follow_the_llm_unless_told(interval, encoders, expected, tmp_path) -> None:
    raw = config_dict(tmp_path, tmp_path)
    raw["pipeline"]["activation_checkpoint_interval"] = interval
    raw["omni"]["encoder_parallel"] = {"recompute": encoders}
    config = validate(raw)
    assert (recomputes(config), encoders_recompute(config)) == expected
