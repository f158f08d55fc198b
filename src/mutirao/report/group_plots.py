"""Pictures of groups: who is near whom, and how many there are for each eps."""

from pathlib import Path

from mutirao.clustering.group_tables import Plane, Scan
from mutirao.io import write_rows, write_whole
from mutirao.report.plot_style import BRIGHT, INK, add_legend, blank, palette, save, tidy


def draw_plane(found: Plane, path: Path) -> None:
    """Draw the clients in the plane, coloured by group; where they lie stands beside the picture in `plane.csv`."""
    groups, plane, share = found.groups, found.points, found.shares
    figure, axes = blank(6.6, 4.6)
    colours = palette(max(1, groups.count))
    for i, name in enumerate(groups.names):
        mine = groups.labels == i
        label = f"{name}: {int(mine.sum())}" if groups.count <= 12 else None
        x, y = plane[mine].T
        axes.scatter(x, y, s=42, color=colours[i], edgecolors="white", linewidths=0.6, label=label)
    if (waits := groups.labels < 0).any():
        x, y = plane[waits].T
        axes.scatter(x, y, s=46, color=INK, marker="x", label=f"waits: {int(waits.sum())}")
    many = "group" if groups.count == 1 else "groups"
    axes.set(
        xlabel=f"first component ({share[0]:.0%} of the variance)",
        ylabel=f"second component ({share[1]:.0%})",
        title=f"{len(groups.clients):,} clients by what their warm-up sent: {groups.count} {many}",
    )
    tidy(axes, grid="both")
    if groups.count <= 12:
        add_legend(axes, title="clients", loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
    places = zip(groups.clients, plane.tolist(), strict=False)
    rows = [["client", "x", "y"], *([client, *place] for client, place in places)]
    write_whole(path.with_name("plane.csv"), write_rows(rows))  # the report draws it again


def draw_scan(scan: Scan, path: Path) -> None:
    """Draw how many groups DBSCAN finds for each eps, and how many clients are in none."""
    tables, chosen = scan.tables, scan.chosen
    figure, panels = blank(8.6, 3.4, 1, len(tables), squeeze=False)
    for axes, (space, rows) in zip(panels[0], tables.items(), strict=True):
        found, last = [r.groups for r in rows], rows[-1].low
        ends = [*(max(r.low, last * 1e-3) for r in rows), last * 1.6]
        axes.stairs(found, ends, color=BRIGHT[0], linewidth=1.8, baseline=None, label="groups")
        axes.set(xscale="log", ylim=(0, max(found) + 0.6), xlabel="eps", title=space)
        right = axes.twinx()
        right.stairs([r.noise for r in rows], ends, color=BRIGHT[1], linestyle="--", baseline=None)
        right.set_ylim(0, 1.02)
        axes.set_ylabel("groups", color=BRIGHT[0])
        right.set_ylabel("share of clients in none", color=BRIGHT[1])
        tidy(axes, grid="both")
        tidy(right, grid="y")
        right.grid(False)
    if chosen.holds:
        axes.axvspan(chosen.low, chosen.high, color=BRIGHT[2], alpha=0.15, linewidth=0)
        axes.annotate("chosen", (chosen.eps, 0.25), ha="center", color=INK, fontsize=9)
    save(figure, path)
