"""Methods: what each reads from the calibration and how it solves each part. Never imports models."""

from trisect.errors import TrisectError, unknown_name
from trisect.methods.a3 import A3, A3_K_ONLY, A3_OV_OVERALL, A3_Q_ONLY, A3_XKV
from trisect.methods.a3plus import A3_PLUS
from trisect.methods.linear_maps import (
    ASVD,
    FWSVD,
    PALU,
    SVD,
    SVD_LLM,
    SVD_LLM_SEQUENTIAL,
    SVD_LLM_V2,
    WANDA_2_4,
    WANDA_4_8,
    WANDA_SPARSE,
)
from trisect.methods.method import Method, solve
from trisect.methods.selection import CLOVER, MAGNITUDE, REAP, WANDA

A3_FAMILY = (A3_PLUS, A3, A3_Q_ONLY, A3_K_ONLY, A3_XKV, A3_OV_OVERALL)
BASELINES = (
    *(CLOVER, PALU, SVD, FWSVD, ASVD, SVD_LLM, SVD_LLM_SEQUENTIAL, SVD_LLM_V2),
    *(REAP, MAGNITUDE, WANDA, WANDA_SPARSE, WANDA_2_4, WANDA_4_8),
)
METHODS: dict[str, Method] = {method.name: method for method in (*A3_FAMILY, *BASELINES)}


def get_method(name: str) -> Method:
    """Look a method up by name."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, "`trisect ls methods` describes them.")
    return METHODS[name]


def register_method(method: Method) -> Method:
    """Add a method from outside the package, for this process; a name that is taken is refused."""
    if METHODS.get(method.name, method) != method:
        raise TrisectError(
            f"There is a method {method.name!r} already; give yours another name, or take an earlier one of "
            f"yours out with METHODS.pop({method.name!r})."
        )
    METHODS[method.name] = method
    return method
