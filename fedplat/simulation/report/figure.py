"""A figure that notebooks show as a picture, without pyplot's global state."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from typing_extensions import override


class ShownFigure(Figure):
    """A figure that is drawn in memory."""

    @override
    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # pyright: ignore[reportArgumentType]
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()
