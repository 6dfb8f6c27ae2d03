"""Exports: the same model in stock transformers and in llama.cpp."""

from tables import Entry, read_all, table, targets, verdict


def exports() -> dict[str, Entry]:
    """Model -> receipt of experiments/export_smollm2.py."""
    return {
        name.removeprefix("export-").removesuffix(".json"): file
        for name, file in read_all("export-*.json").items()
    }


def export_table() -> str:
    header = ["model", "export", "perplexity", "against native", "same greedy texts", "file"]
    rows = []
    for model, file in exports().items():
        for name, row in file["rows"].items():
            cells = [model, name, f"{row['perplexity']:.4f}" if "perplexity" in row else ""]
            cells += [_against(row), _greedy(row), f"{row['bytes'] / 1e6:.1f} MB" if "bytes" in row else ""]
            rows.append(cells)
    return table(header, rows)


def _against(row: Entry) -> str:
    if "relative_to_native" in row:
        return f"{row['relative_to_native']:+.3%}"
    if "largest_difference_of_logits" in row:
        return f"logits within {row['largest_difference_of_logits']:.0e} of {row['largest_logit']:.1f}"
    return f"{row['removed']:.1%} removed"


def _greedy(row: Entry) -> str:
    if "greedy" not in row:
        return ""
    told = f"{row['greedy']['same']} of {row['greedy']['texts']}"
    gaps = [parting["nats"] for parting in row.get("partings", [])]
    return f"{told}; others part where native tokens lead by {max(gaps):.3f} nats or less" if gaps else told


def export_short() -> list[str]:
    asked, lines = targets(), []
    for model, file in exports().items():
        logits = file["rows"]["hf float32"]["largest_difference_of_logits"]
        f16 = abs(file["rows"]["gguf f16"]["relative_to_native"])
        limit, most = asked["export_logits"], asked["export_perplexity"]
        stock = verdict(logits, limit, shown=f"{logits:.0e}", asked=f"{limit:g}")
        gguf = verdict(f16, most, shown=f"{f16:.3%}", asked=f"{most:.1%}")
        lines.append(f"{model}: logits of the stock checkpoint differ by {stock}.")
        lines.append(f"{model}: perplexity of the f16 file in llama.cpp differs by {gguf}.")
        for name, row in file["rows"].items():
            if "greedy" in row and row["greedy"]["same"] < row["greedy"]["texts"]:
                lines.append(f"{model}, {name}: not every greedy text is the native one.")
    return lines
