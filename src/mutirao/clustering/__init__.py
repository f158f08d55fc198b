"""Client groups: cluster similar clients, admit late joiners to groups, and combine the models of groups."""

from mutirao.clustering.ensemble import combine
from mutirao.clustering.formation import Admission, admit, form, quality
from mutirao.clustering.group_state import Groups

__all__ = ["Admission", "Groups", "admit", "combine", "form", "quality"]
