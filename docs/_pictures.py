"""Pictures that pages make: shown in place, on white in light and dark."""

import base64
import io
from pathlib import Path

import matplotlib.pyplot as plt


def show(picture, alt: str) -> str:
    """HTML that shows a matplotlib figure, or an SVG or PNG file."""
    if isinstance(picture, str | Path):
        data, kind = Path(picture).read_bytes(), Path(picture).suffix[1:]
    else:
        buffer = io.BytesIO()
        picture.savefig(buffer, format="svg", bbox_inches="tight")
        plt.close(picture)
        data, kind = buffer.getvalue(), "svg"
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    text = base64.b64encode(data).decode()
    return (
        f'<img class="picture" alt="{alt}" src="data:{mime};base64,{text}">'
    )
