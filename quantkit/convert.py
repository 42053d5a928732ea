from quantkit.conversion import *  # noqa: F403
