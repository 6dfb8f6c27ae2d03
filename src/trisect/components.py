"""What a layer is made of, by name. Imports nothing, so that settings are checked before torch is there."""

COMPONENTS = ("qk", "ov", "mlp")

LINEARS = {"qk": ("q", "k"), "ov": ("v", "o"), "mlp": ("gate", "up", "down")}
"""Component -> the linear maps it is made of, by the same names in every family, fused or not."""

INPUTS = {"q": "x", "k": "x", "v": "x", "o": "a", "gate": "up", "up": "up", "down": "down"}
"""Linear map -> its input's name in the moments: x attention, a heads' outputs, up MLP, down neurons."""
