//! Fusion: a window of the stream becomes a plan of few steps, found once and replayed.
//!
//! A submitted batch is a [`Window`]. The [`Engine`] compares it with those it knows; on a miss it searches the window's
//! graph for sets of nodes that a [`Fuser`] takes (`search.rs`), orders the groups and keeps the [`Plan`]. Replaying a
//! plan hands each group's original nodes to its [`Optimization`], with the device's own handles. The engine knows
//! no device: any that lists fusers and supplies [`Handles`] gets fusion. Of operations it knows which rearrange
//! (`moved.rs`) and which are elementwise (`again.rs`).
#![forbid(unsafe_code)]

mod fuser;
mod observer;
mod window;
mod search;
mod arrange;
mod plan;
mod moved;
mod recompute;
mod template;
mod lowered;
mod store;
mod disk;
mod engine;

pub use engine::{Engine, LAUNCH, Limits, Stats, Ticket, WindowContext};
pub use fuser::{Failure, Fuser, Handles, Optimization, Status};
pub use observer::{NewPlan, Observer};
pub use plan::{Group, Plan, PlanStep};
pub use window::Window;
