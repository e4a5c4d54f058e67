"""How hypothesis draws what ranks run."""

from functools import partial

from hypothesis import HealthCheck, Phase, settings

few = partial(
    settings, phases=(Phase.explicit, Phase.generate), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
"""`settings` without a search for smaller examples: each failure ends the ranks, which take long to start."""
