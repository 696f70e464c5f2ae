"""What keeps a long run alive and honest: agreement, deadlines, preemption, and where its time went."""
