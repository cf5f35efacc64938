//! Who am I among how many: from the environment that a launcher sets, whichever it is.

use crate::Error;
use serde::{Deserialize, Serialize};

/// Which launcher's variables were found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Launcher {
    /// `KILN_RANK`, `KILN_WORLD`, `KILN_JOB`.
    Kiln,
    /// `mpirun` of OpenMPI.
    OpenMpi,
    /// `mpiexec` of MPICH and its kin.
    Pmi,
    /// `torchrun` and everything that sets the same.
    Torch,
    /// `srun`.
    Slurm,
}

/// The place of this process in its job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rendezvous {
    /// Its number, from 0.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
    /// Its number on this machine.
    pub local_rank: usize,
    /// How many are on this machine.
    pub local_world: usize,
    /// Names the job, and the attempt: all its ranks and nobody else have it. `kiln launch` draws one that nobody can
    /// guess; other launchers' can be, and then another user may hold the place where the ranks would meet first:
    /// that ends in [`Error::Taken`], and nothing is sent there.
    pub job: String,
    /// Who started it.
    pub launcher: Launcher,
    /// `KILN_ENGINE`: `shm` or `mpi`, if the choice is not left to us.
    pub engine: Option<String>,
}

/// What must be the same on all ranks of a job, besides their number and the shards.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Identity {
    /// Of the program.
    pub version: String,
    /// A signature of the model: paths and shapes of its parameters.
    pub model: String,
    /// What it is trained in.
    pub dtype: String,
    /// Whatever changes bits between machines.
    pub numerics: String,
}

impl Identity {
    /// This version, and what the caller tells.
    pub fn new(model: &str, dtype: &str, numerics: &str) -> Identity {
        let own = |s: &str| s.to_string();
        Identity {
            version: own(env!("CARGO_PKG_VERSION")),
            model: own(model),
            dtype: own(dtype),
            numerics: own(numerics),
        }
    }
}

/// Longer words are told by their beginning, their length and a hash.
#[cfg(any(test, target_os = "linux"))]
const WORD: usize = 512;

#[cfg(any(test, target_os = "linux"))]
impl Identity {
    /// With words short enough to be sent in one message and to be read in an error: a model of many layers has a
    /// signature of many pages.
    pub(crate) fn short(self) -> Identity {
        let short = |word: String| {
            let end = (0..=WORD).rev().find(|&end| word.is_char_boundary(end)).unwrap_or(0);
            match word.len() > 2 * WORD {
                true => {
                    let tag = crate::Tag::default().add(&word).finish();
                    format!("{}… ({} bytes, {tag:016x})", &word[..end], word.len())
                }
                false => word,
            }
        };
        Identity {
            version: short(self.version),
            model: short(self.model),
            dtype: short(self.dtype),
            numerics: short(self.numerics),
        }
    }
}

impl Rendezvous {
    /// From this process's environment; nothing if no launcher started it.
    pub fn from_env() -> Result<Option<Rendezvous>, Error> {
        Rendezvous::from(|name| std::env::var(name).ok())
    }

    /// From these variables.
    pub fn from(get: impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>, Error> {
        let Some(style) = STYLES.iter().find(|s| get(s.rank).is_some() && first(&get, s.world).is_some())
        else {
            return Ok(None);
        };
        let number = |name: &str| -> Result<Option<usize>, Error> {
            let Some(text) = get(name) else { return Ok(None) };
            let reason = format!("`{text}` is no number");
            text.trim().parse().map(Some).map_err(|_| Error::Environment { variable: name.into(), reason })
        };
        let rank = number(style.rank)?.unwrap_or(0);
        let (world_name, _) = first(&get, style.world).unwrap_or_default();
        let world = number(&world_name)?.unwrap_or(1);
        if rank >= world {
            let reason = format!("rank {rank} is not below {world_name} = {world}");
            return Err(Error::Environment { variable: style.rank.into(), reason });
        }
        let local = |names: &[&str], otherwise| match first(&get, names) {
            Some((name, _)) => number(&name).map(|n| n.unwrap_or(otherwise)),
            None => Ok(otherwise),
        };
        let parts: Vec<String> = style.job.iter().filter_map(|name| get(name)).collect();
        let job = if !parts.is_empty() {
            parts.join("-")
        } else if style.launcher == Launcher::Kiln {
            let reason = "is not set: it names the job that the ranks belong to".to_string();
            return Err(Error::Environment { variable: kiln_env::JOB.name().into(), reason });
        } else {
            // Ranks of one job on one machine are children of one launcher.
            parent()?
        };
        Ok(Some(Rendezvous {
            rank,
            world,
            local_rank: local(style.local_rank, rank)?,
            local_world: local(style.local_world, world)?,
            job,
            launcher: style.launcher,
            engine: get(kiln_env::ENGINE.name()),
        }))
    }
}

/// A name for the children of one launcher.
#[cfg(unix)]
fn parent() -> Result<String, Error> {
    Ok(format!("parent-{}", std::os::unix::process::parent_id()))
}

/// Elsewhere a process is not told who has started it.
#[cfg(not(unix))]
fn parent() -> Result<String, Error> {
    let reason = "is not set: it names the job that the ranks belong to".into();
    Err(Error::Environment { variable: kiln_env::JOB.name().into(), reason })
}

/// The variables of a launcher.
struct Style {
    launcher: Launcher,
    rank: &'static str,
    world: &'static [&'static str],
    local_rank: &'static [&'static str],
    local_world: &'static [&'static str],
    job: &'static [&'static str],
}

/// In order: what starts inside an allocation of another counts before that one.
const STYLES: [Style; 5] = [
    Style {
        launcher: Launcher::Kiln,
        rank: "KILN_RANK",
        world: &["KILN_WORLD"],
        local_rank: &["KILN_LOCAL_RANK"],
        local_world: &["KILN_LOCAL_WORLD"],
        job: &["KILN_JOB"],
    },
    Style {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        world: &["OMPI_COMM_WORLD_SIZE"],
        local_rank: &["OMPI_COMM_WORLD_LOCAL_RANK"],
        local_world: &["OMPI_COMM_WORLD_LOCAL_SIZE"],
        job: &["PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"],
    },
    Style {
        launcher: Launcher::Torch,
        rank: "RANK",
        world: &["WORLD_SIZE"],
        local_rank: &["LOCAL_RANK"],
        local_world: &["LOCAL_WORLD_SIZE"],
        job: &["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"],
    },
    Style {
        launcher: Launcher::Slurm,
        rank: "SLURM_PROCID",
        world: &["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"],
        local_rank: &["SLURM_LOCALID"],
        local_world: &["SLURM_NTASKS_PER_NODE"],
        job: &["SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"],
    },
    Style {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        world: &["PMI_SIZE"],
        local_rank: &["MPI_LOCALRANKID", "PMI_LOCAL_RANK"],
        local_world: &["MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"],
        job: &["PMI_JOBID", "HYDI_CONTROL_FD"],
    },
];

fn first(get: &impl Fn(&str) -> Option<String>, names: &[&str]) -> Option<(String, String)> {
    names.iter().find_map(|name| get(name).map(|value| (name.to_string(), value)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> Result<Option<Rendezvous>, Error> {
        Rendezvous::from(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn every_launcher_is_understood() {
        assert_eq!(from(&[("PATH", "/bin")]), Ok(None));
        let cases: [(&[(&str, &str)], _); 5] = [
            (
                &[
                    ("KILN_RANK", "1"),
                    ("KILN_WORLD", "4"),
                    ("KILN_LOCAL_RANK", "1"),
                    ("KILN_JOB", "j"),
                    ("RANK", "3"),
                    ("WORLD_SIZE", "9"),
                ],
                (1, 4, 1, 4, "j", Launcher::Kiln),
            ),
            (
                &[
                    ("OMPI_COMM_WORLD_RANK", "5"),
                    ("OMPI_COMM_WORLD_SIZE", "8"),
                    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
                    ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
                    ("PMIX_NAMESPACE", "123"),
                    ("SLURM_PROCID", "0"),
                    ("SLURM_NTASKS", "1"),
                ],
                (5, 8, 1, 4, "123", Launcher::OpenMpi),
            ),
            (
                &[
                    ("RANK", "2"),
                    ("WORLD_SIZE", "3"),
                    ("LOCAL_RANK", "2"),
                    ("MASTER_ADDR", "127.0.0.1"),
                    ("MASTER_PORT", "29500"),
                ],
                (2, 3, 2, 3, "127.0.0.1-29500", Launcher::Torch),
            ),
            (
                &[
                    ("SLURM_PROCID", "3"),
                    ("SLURM_NTASKS", "4"),
                    ("SLURM_LOCALID", "1"),
                    ("SLURM_NTASKS_PER_NODE", "2"),
                    ("SLURM_JOB_ID", "77"),
                    ("SLURM_STEP_ID", "0"),
                ],
                (3, 4, 1, 2, "77-0", Launcher::Slurm),
            ),
            (&[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("PMI_JOBID", "k")], (0, 2, 0, 2, "k", Launcher::Pmi)),
        ];
        for (vars, (rank, world, local_rank, local_world, job, launcher)) in cases {
            let got = from(vars).unwrap().unwrap();
            let job = job.to_string();
            assert_eq!(got, Rendezvous { rank, world, local_rank, local_world, job, launcher, engine: None });
        }
    }

    #[test]
    fn long_words_are_short_and_still_differ() {
        let identity = |end: &str| Identity::new(&("ü".repeat(100_000) + end), "f32", "cpu-2").short();
        assert_eq!(identity("a"), identity("a"));
        assert_ne!(identity("a"), identity("b"));
        assert!(identity("a").model.len() < 2 * WORD && identity("a").dtype == "f32");
        assert_eq!(identity("a").short(), identity("a"));
    }

    #[test]
    fn nonsense_names_its_variable() {
        let variable = |vars| match from(vars) {
            Err(Error::Environment { variable, .. }) => variable,
            other => panic!("{other:?}"),
        };
        assert_eq!(variable(&[("RANK", "x"), ("WORLD_SIZE", "2")]), "RANK");
        assert_eq!(variable(&[("RANK", "2"), ("WORLD_SIZE", "2")]), "RANK");
        assert_eq!(variable(&[("KILN_RANK", "0"), ("KILN_WORLD", "2")]), "KILN_JOB");
    }
}
