"""What a user is told: the rows beside a plan, the reasons, the reports."""
