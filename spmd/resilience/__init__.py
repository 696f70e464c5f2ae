"""What keeps a long run alive and honest: agreement, deadlines, preemption, and checks of what devices compute."""
