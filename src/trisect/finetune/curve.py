"""The loss of every step: as JSON, and as a picture where matplotlib is there."""

from pathlib import Path

from trisect.files import new_file, write_json

JSON_NAME, PICTURE_NAME = "loss.json", "loss.png"
SPAN = 0.1
"""The smooth line is a mean over this share of the steps."""


def write_curve(folder: Path, losses: list[float], *, title: str) -> list[Path]:
    """Write the curve beside the weights; the files that were written."""
    write_json(folder / JSON_NAME, {"unit": "nats per learned token", "loss": losses})
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return [folder / JSON_NAME]
    draw(folder / PICTURE_NAME, losses, title=title)
    return [folder / JSON_NAME, folder / PICTURE_NAME]


def draw(path: Path, losses: list[float], *, title: str) -> None:
    """The loss of each step, and its running mean; the same losses give the same bytes."""
    from matplotlib.figure import Figure

    steps = range(1, len(losses) + 1)
    figure = Figure(figsize=(6.0, 3.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="#9db4cc", linewidth=0.8, label="step")
    axes.plot(steps, running_mean(losses), color="#b2182b", linewidth=1.6, label="running mean")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per learned token")
    axes.set_title(title, fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    with new_file(path) as partial:
        figure.savefig(partial, format="png", metadata={"Software": None})


def running_mean(losses: list[float]) -> list[float]:
    """Mean of the last tenth of the steps before each one, itself included."""
    span = max(1, round(SPAN * len(losses)))
    parts = [losses[max(0, end - span) : end] for end in range(1, len(losses) + 1)]
    return [sum(part) / len(part) for part in parts]
