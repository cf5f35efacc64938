//! Reading what ranks left behind when a group failed: who is to blame, what differed first, who came late.

use crate::recorder::{Dump, Record, State};
use crate::{Error, Signature};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

/// What the records of all ranks say together.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Verdict {
    /// How many ranks the job had.
    pub world: usize,
    /// Whose records are there.
    pub ranks: Vec<usize>,
    /// The ranks to look at first.
    pub culprits: Vec<usize>,
    /// Why.
    pub finding: Finding,
    /// How late each rank came on average, in microseconds after the first, over the calls that all made.
    pub late: BTreeMap<usize, u64>,
}

/// What went wrong first.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Finding {
    /// At this place of a group, ranks were not at the same collective: each rank's call, with its line.
    Differs {
        /// The group by name.
        name: String,
        /// Where in its sequence.
        sequence: u64,
        /// What each rank called there.
        calls: BTreeMap<usize, (Signature, String)>,
    },
    /// Some ranks never made a call that others waited in.
    Missing {
        /// The group by name.
        name: String,
        /// The call, and the line of a rank that made it.
        call: (Signature, String),
        /// The last thing each missing rank did in that group.
        last: BTreeMap<usize, Option<(Signature, String)>>,
    },
    /// All calls agree; this is the error that ranks report.
    Reported(String),
    /// Nothing is wrong.
    Clean,
}

/// Reads the records in a folder.
pub fn read(folder: &Path) -> Result<Vec<Dump>, Error> {
    let problem = |e: &dyn fmt::Display| Error::system(&folder.display().to_string(), e);
    let mut dumps = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| problem(&e))?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("rank-") && name.ends_with(".json") {
            let text = std::fs::read(entry.path()).map_err(|e| problem(&e))?;
            dumps.push(serde_json::from_slice::<Dump>(&text).map_err(|e| problem(&format!("{name}: {e}")))?);
        }
    }
    if dumps.is_empty() {
        return Err(problem(&"no flight records here"));
    }
    dumps.sort_by_key(|d| d.rank);
    Ok(dumps)
}

/// Calls of one group by place and rank.
type Places<'a> = BTreeMap<u64, BTreeMap<usize, &'a Record>>;

/// Finds the culprit and the first difference.
pub fn judge(dumps: &[Dump]) -> Verdict {
    let mut groups: BTreeMap<u64, Places> = BTreeMap::new();
    for dump in dumps {
        for record in &dump.records {
            let Signature { group, sequence, .. } = record.signature;
            groups.entry(group).or_default().entry(sequence).or_default().insert(dump.rank, record);
        }
    }
    let ranks: Vec<usize> = dumps.iter().map(|d| d.rank).collect();
    let world = dumps.iter().map(|d| d.world).max().unwrap_or(0);
    let (culprits, finding) = differs(&groups)
        .or_else(|| reported(dumps, world))
        .or_else(|| missing(&groups))
        .unwrap_or((Vec::new(), Finding::Clean));
    Verdict { world, ranks, culprits, finding, late: late(&groups) }
}

/// The first place, by the time of the calls, where two ranks asked for different things. Those in the minority are to
/// blame; where there is none, nobody can be told from the others.
fn differs(groups: &BTreeMap<u64, Places>) -> Option<(Vec<usize>, Finding)> {
    let mut places: Vec<_> = groups.values().flatten().collect();
    places.sort_by_key(|(_, calls)| calls.values().map(|r| r.issued).min());
    for (&sequence, calls) in places {
        let mut votes: Vec<(Signature, Vec<usize>)> = Vec::new();
        for (&rank, record) in calls {
            match votes.iter_mut().find(|(s, _)| *s == record.signature) {
                Some((_, who)) => who.push(rank),
                None => votes.push((record.signature, vec![rank])),
            }
        }
        if votes.len() < 2 {
            continue;
        }
        let most = votes.iter().map(|(_, who)| who.len()).max().unwrap_or(0);
        let tied = votes.iter().filter(|(_, who)| who.len() == most).count() > 1;
        let minority =
            votes.iter().filter(|(_, who)| tied || who.len() < most).flat_map(|(_, who)| who.clone());
        let mut culprits: Vec<usize> = minority.collect();
        culprits.sort();
        let name = calls.values().next().map(|r| r.name.clone()).unwrap_or_default();
        let calls = calls.iter().map(|(&rank, r)| (rank, (r.signature, r.line.clone()))).collect();
        return Some((culprits, Finding::Differs { name, sequence, calls }));
    }
    None
}

/// What ranks say of others: lost, late, refused, poisoned. Ranks without a record are lost too.
fn reported(dumps: &[Dump], world: usize) -> Option<(Vec<usize>, Finding)> {
    let mut named = BTreeSet::new();
    let mut message = None;
    for dump in dumps {
        let found = match &dump.error {
            Some(
                Error::RankLost { rank, .. } | Error::Poisoned { rank, .. } | Error::Refused { rank, .. },
            ) => vec![*rank],
            Some(Error::Deadline { missing, .. } | Error::Absent { missing, .. }) => missing.clone(),
            Some(Error::Aborted { rank, .. }) => vec![*rank],
            _ => continue,
        };
        named.extend(found);
        message = message.or(dump.message.clone());
    }
    let message = message?;
    let silent: Vec<usize> = (0..world).filter(|r| !dumps.iter().any(|d| d.rank == *r)).collect();
    // A rank that left no record, and that others name, is the likelier cause than one that could still write.
    let gone: Vec<usize> = silent.into_iter().filter(|r| named.contains(r)).collect();
    let culprits = if gone.is_empty() { named.into_iter().collect() } else { gone };
    Some((culprits, Finding::Reported(message)))
}

/// The first call that some rank of a group waited in and another never made.
fn missing(groups: &BTreeMap<u64, Places>) -> Option<(Vec<usize>, Finding)> {
    for places in groups.values() {
        let members: BTreeSet<usize> = places.values().flat_map(|calls| calls.keys().copied()).collect();
        for calls in places.values() {
            let Some(waiting) = calls.values().find(|r| r.state != State::Done) else { continue };
            let absent: Vec<usize> = members.iter().copied().filter(|r| !calls.contains_key(r)).collect();
            if absent.is_empty() {
                continue;
            }
            let last = |rank: usize| {
                let record = places.values().rev().find_map(|calls| calls.get(&rank));
                (rank, record.map(|r| (r.signature, r.line.clone())))
            };
            let finding = Finding::Missing {
                name: waiting.name.clone(),
                call: (waiting.signature, waiting.line.clone()),
                last: absent.iter().map(|&r| last(r)).collect(),
            };
            return Some((absent, finding));
        }
    }
    None
}

fn late(groups: &BTreeMap<u64, Places>) -> BTreeMap<usize, u64> {
    let mut sums: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    for calls in groups.values().flat_map(|places| places.values()).filter(|calls| calls.len() > 1) {
        let first = calls.values().map(|r| r.issued).min().unwrap_or(0);
        for (&rank, record) in calls {
            let (sum, count) = sums.entry(rank).or_default();
            *sum += record.issued - first;
            *count += 1;
        }
    }
    sums.into_iter().map(|(rank, (sum, count))| (rank, sum / count)).collect()
}

impl Verdict {
    /// The rank that all others wait for, where one comes much later than the rest.
    pub fn straggler(&self) -> Option<(usize, u64)> {
        let (&rank, &most) = self.late.iter().max_by_key(|(_, micros)| **micros)?;
        let next = self.late.iter().filter(|(r, _)| **r != rank).map(|(_, micros)| *micros).max()?;
        (most > 1000 && most > 2 * next).then_some((rank, most))
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "records of {} of {} ranks", self.ranks.len(), self.world)?;
        match &self.culprits[..] {
            [] => writeln!(f, "no culprit")?,
            culprits => writeln!(f, "culprit: {}", list(culprits))?,
        }
        match &self.finding {
            Finding::Differs { name, sequence, calls } => {
                writeln!(f, "first difference: collective {sequence} of group {name}")?;
                for (rank, (call, line)) in calls {
                    writeln!(f, "  rank {rank}: {call} at {line}")?;
                }
            }
            Finding::Missing { name, call: (call, line), last } => {
                writeln!(f, "first call not made by all, in group {name}: {call} at {line}")?;
                for (rank, last) in last {
                    match last {
                        Some((call, line)) => writeln!(f, "  rank {rank} came as far as {call} at {line}")?,
                        None => writeln!(f, "  rank {rank} made no call")?,
                    }
                }
            }
            Finding::Reported(message) => writeln!(f, "{message}")?,
            Finding::Clean => writeln!(f, "all calls agree")?,
        }
        for (rank, micros) in &self.late {
            writeln!(f, "rank {rank} came {micros} µs after the first on average")?;
        }
        if let Some((rank, micros)) = self.straggler() {
            writeln!(f, "straggler: rank {rank}, {micros} µs behind on average")?;
        }
        Ok(())
    }
}

fn list(ranks: &[usize]) -> String {
    ranks.iter().map(|r| format!("rank {r}")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Loss, Op, Reduce};
    use kiln_ir::DType;

    fn record(sequence: u64, length: u64, state: State, issued: u64) -> Record {
        let op = Op::AllReduce(Reduce::Sum);
        let signature = Signature { sequence, group: 1, op, dtype: DType::F32, length, tag: 0 };
        let line = format!("train.rs:{length}");
        Record { signature, name: "world".into(), state, line, issued, started: 1, ended: 2 }
    }

    fn dump(rank: usize, records: Vec<Record>, error: Option<Error>) -> Dump {
        let message = error.as_ref().map(|e| e.to_string());
        Dump { rank, world: 3, pid: 1, error, message, records }
    }

    #[test]
    fn the_minority_at_the_first_difference_is_the_culprit() {
        let dumps: Vec<Dump> = (0..3)
            .map(|rank| {
                let odd = if rank == 1 { 30 } else { 20 };
                let of = |n, length| record(n, length, State::Done, 1000 * n + 50 * rank as u64);
                dump(rank, vec![of(1, 10), of(2, odd), of(3, odd + 1)], None)
            })
            .collect();
        let verdict = judge(&dumps);
        assert_eq!(verdict.culprits, [1]);
        assert!(
            matches!(&verdict.finding, Finding::Differs { sequence: 2, calls, .. } if calls[&1].1 == "train.rs:30")
        );
        assert_eq!(verdict.late, BTreeMap::from([(0, 0), (1, 50), (2, 100)]));
        assert!(verdict.to_string().contains("culprit: rank 1"), "{verdict}");
        assert_eq!(verdict.straggler(), None);
        let late = BTreeMap::from([(0, 5), (1, 90), (2, 5000)]);
        assert_eq!(Verdict { late, ..verdict }.straggler(), Some((2, 5000)));
    }

    #[test]
    fn a_rank_that_stopped_calling_is_the_culprit() {
        let dumps: Vec<Dump> = (0..3)
            .map(|rank| {
                let mut records = vec![record(1, 10, State::Done, 1)];
                if rank != 2 {
                    records.push(record(2, 20, State::Started, 2));
                }
                dump(rank, records, None)
            })
            .collect();
        let verdict = judge(&dumps);
        assert_eq!(verdict.culprits, [2]);
        assert!(matches!(verdict.finding, Finding::Missing { .. }));
        assert!(verdict.to_string().contains("rank 2 came as far as collective 1"), "{verdict}");
    }

    #[test]
    fn a_rank_without_a_record_that_others_name_is_the_culprit() {
        let error = Error::RankLost { rank: 2, cause: Loss::Died { pid: 9 } };
        let dumps = [0, 1].map(|r| dump(r, vec![record(1, 10, State::Failed, 1)], Some(error.clone())));
        let verdict = judge(&dumps);
        assert_eq!(verdict.culprits, [2]);
        assert_eq!(verdict.finding, Finding::Reported("rank 2 is lost: process 9 died".into()));
        assert_eq!(judge(&[dump(0, vec![], None)]).finding, Finding::Clean);
    }
}
