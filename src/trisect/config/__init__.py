"""What a user chose: records that are checked once, and readable back from YAML or JSON."""

from trisect.config.goals import Goal, Increase, Limit, Share
from trisect.config.settings import (
    ALLOCATIONS,
    DEFAULT_ALIGN,
    CalibrationConfig,
    CompressConfig,
    layer_out_of_range,
    parse_align,
    parse_layers,
    read_mapping,
)
