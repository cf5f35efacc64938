//! Groups of workers and the collectives between them, on bytes of a dtype; tensors are above.
//!
//! A [`Group`] is some ranks: threads of a process, processes of a machine, or MPI ranks. Each gives a [`Buffer`] to a
//! collective and gets it back with the result. Reductions follow one tree over the job's logical shards ([`Layout`]),
//! so that the engine and the number of ranks change no bit. Nothing waits without a deadline, a lost rank is named on
//! every survivor, calls that do not match are told apart before data mixes, and the last calls of every rank are kept
//! ([`flight`]).

mod error;
mod layout;
mod tag;
mod call;
mod reduce;
mod memory;
mod buffer;
mod futex;

mod engine;
mod group;
mod counter;
mod recorder;
pub mod flight;

mod rendezvous;
// Processes meet and share memory by what Linux alone has: memfd with seals, futexes, abstract sockets, pidfds. Threads of
// a process work anywhere.
#[cfg(target_os = "linux")]
mod join;
#[cfg(all(feature = "mpi", not(target_os = "linux")))]
compile_error!("the feature `mpi` has been written for Linux, where its ranks are told apart and watched");

pub use buffer::{Buffer, Range};
pub use call::{Call, Op, Reduce, Signature};
pub use counter::Counter;
pub use engine::Traffic;
pub use error::{Error, Loss};
pub use group::{Claim, Config, Group, Pending, Promise};
pub use layout::Layout;
pub use recorder::{Dump, KEPT, Record, State, write as write_flight};
pub use rendezvous::{Identity, Launcher, Rendezvous};
pub use tag::Tag;
