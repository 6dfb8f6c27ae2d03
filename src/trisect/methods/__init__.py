"""Methods: what each reads from the calibration and how it solves each part. Never imports models."""

from trisect.errors import TrisectError, check_names
from trisect.methods import a3, a3plus, baselines
from trisect.methods.method import ComponentMethod, LinearMethod, Method, Options, RankRule, options_of, solve

A3_FAMILY = (a3plus.A3_PLUS, *a3.PUBLISHED)
METHODS: dict[str, Method] = {method.name: method for method in (*A3_FAMILY, *baselines.BASELINES)}


def get_method(name: str) -> Method:
    """Look a method up by name."""
    check_names("method", [name], METHODS, "`trisect ls methods` describes them.")
    return METHODS[name]


def register_method(method: Method) -> Method:
    """Add a method from outside the package, for this process; a name that is taken is refused."""
    if METHODS.get(method.name, method) != method:
        taken = f"There is a method {method.name!r} already"
        raise TrisectError(f"{taken}; give yours another name, or take that one out: METHODS.pop({method.name!r}).")
    METHODS[method.name] = method
    return method
