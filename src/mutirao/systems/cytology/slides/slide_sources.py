"""Image sources of the cytology recipe: folders of cells, or tiles cut out of synthetic slides."""

from typing import Any

from mutirao.datasets.image_layouts import GroupRows, ungrouped
from mutirao.datasets.locations import find_data
from mutirao.datasets.tile_folders import TileScale, tile_scale_of
from mutirao.systems.images.choices import BAG_HEADS, ELSEWHERE
from mutirao.systems.images.image_sources import Sources, find_image_sources, read_own, read_prepared

SLIDES = 3  # synthetic slides a laboratory
PLANTED_SLIDES = 16  # the same for heads of whole slides


def find_sources(config: Any, classes: tuple[str, ...] = ()) -> Sources:
    """Read the setting `data`; with `sites` all images belong to one site.

    With a head for whole slides, rows are slides.
    """
    if config.data == ELSEWHERE:
        return read_own(None, config.clients, config.slide, classes)
    rows_of: GroupRows = ungrouped
    if bags := config.head in BAG_HEADS:
        from mutirao.systems.images.bags import as_slides, gather_slides

        rows_of = gather_slides
    root = find_data(config.data)
    if config.data == "synthetic":
        from mutirao.systems.cytology.slides.synthetic_slides import make_laboratories

        slides = config.slides or (PLANTED_SLIDES if bags else SLIDES)
        root = make_laboratories(config.clients, slides, config.side, config.seed, planted=bags)
        found = read_prepared(root, config.clients, config.slide)
    elif config.sites:
        found = read_own(root, config.clients, config.slide, classes)
    else:
        found = find_image_sources(root, config, config.slide, rows_of=rows_of)
    if bags:
        return as_slides(found)
    return found


def scale_in(config: Any) -> TileScale | None:
    """The scale of the images in `data`, if it is known; it is stored with the model for screening."""
    if config.data == "synthetic":
        return TileScale(512, 0.5)  # as `tile_slide` cuts them there
    if config.data == ELSEWHERE:
        return None
    return tile_scale_of(find_data(config.data))
