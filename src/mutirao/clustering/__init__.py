"""Client groups: cluster similar clients, admit late joiners to groups, and combine the models of groups."""

from mutirao.clustering.ensemble import combine
from mutirao.clustering.formation import form, quality
from mutirao.clustering.late_joiners import Admission, admit
from mutirao.clustering.membership import Groups

__all__ = ["Admission", "Groups", "admit", "combine", "form", "quality"]
