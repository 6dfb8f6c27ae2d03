"""What a user chose: records that are checked once, and readable back from YAML or JSON."""

from trisect.config.goals import Goal, Increase, Limit, Share
from trisect.config.settings import DEFAULT_ALIGN, CalibrationConfig, CompressConfig, parse_align, read_mapping
from trisect.config.verbs import LoadOptions
