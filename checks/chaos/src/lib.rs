//! What it takes to break remote devices on purpose, and to see that they hold.
//!
//! [`Proxy`] stands between client and server and cuts, delays, flips, stalls and trickles where it is told;
//! [`Serving`] is a server in this process, [`Process`] one of its own that can be killed; [`Raw`] speaks the protocol
//! byte by byte; [`train`](program::train) is a training whose parameters have a digest; [`fuzz`] has the fuzz targets.
//! Every random choice comes from a seed that is printed.
#![forbid(unsafe_code)]

pub mod fuzz;
pub mod process;
pub mod program;
pub mod proxy;
mod random;
mod raw;
mod serving;

pub use process::Process;
pub use proxy::{At, Fault, Proxy, Way, What};
pub use random::Random;
pub use raw::{Raw, hello};
pub use serving::{Options, Serving, open, tls};
