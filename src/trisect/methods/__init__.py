"""Methods: what each reads from the calibration and how it solves each part. Never imports models."""

from trisect.errors import unknown_name
from trisect.methods.a3 import A3, A3_K_ONLY, A3_OV_OVERALL, A3_Q_ONLY, A3_XKV
from trisect.methods.a3plus import A3_PLUS
from trisect.methods.method import Method, solve

METHODS: dict[str, Method] = {
    method.name: method for method in (A3_PLUS, A3, A3_Q_ONLY, A3_K_ONLY, A3_XKV, A3_OV_OVERALL)
}


def get_method(name: str) -> Method:
    """Look a method up by name."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS, "`trisect ls methods` describes them.")
    return METHODS[name]


__all__ = ["METHODS", "Method", "get_method", "solve"]
