"""Memory, link traffic and utilisation over the phases of a stock iteration."""
