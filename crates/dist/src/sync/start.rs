//! How a sync begins: all ranks must have the same parameters, and get rank 0's values of them.

use super::moves::Moves;
use super::{Config, GradientSync, Way};
use crate::Error;
use kiln_group::{Call, Group, Layout, Op, Pending};
use kiln_nn::Module;
use kiln_tensor::{Bytes, DType, Data, Device, Tensor};
use std::collections::HashMap;

impl GradientSync {
    /// Between the ranks of a group: every one calls. Parameters become those of rank 0. A second one of the same name
    /// is refused until the first is closed.
    pub fn start(group: &Group, model: &mut dyn Module, config: Config) -> Result<GradientSync, Error> {
        if group.ranks() == 1 {
            let claim = Some(group.claim(&config.name)?);
            return Ok(GradientSync::new(config, group.layout(), 0, Way::Alone, false, claim));
        }
        Ok(start(std::slice::from_ref(group), &mut [model], false, config)?.remove(0))
    }

    /// Between the devices of some copies of a model, all of this program: one sync for each. `shards` is the number of
    /// logical shards, at least as many as copies. Devices that compute in this process are ranks of a group of their own;
    /// where one computes on a server ([`Device::locality`]), devices exchange by moves, servers among themselves. One
    /// thread may drive all of them in order, which has each differentiate before one waits, or each has a thread of its
    /// own, which begins its rounds and waits for them.
    pub fn over(
        models: &mut [&mut dyn Module],
        shards: usize,
        config: Config,
    ) -> Result<Vec<GradientSync>, Error> {
        let layout = Layout::new(shards, models.len())?;
        let devices: Vec<Option<Device>> = models.iter().map(|m| device(&**m)).collect();
        let remote = |d: &Option<Device>| d.as_ref().is_some_and(Device::is_remote);
        if models.len() == 1 {
            return Ok(vec![GradientSync::alone(shards, config)?]);
        }
        if devices.iter().any(remote) {
            let moves = std::sync::Arc::new(Moves::new(models.len(), shards, config.deadline));
            copy(models)?;
            let sync =
                |rank| GradientSync::new(config.clone(), layout, rank, Way::Moves(moves.clone()), true, None);
            return Ok((0..models.len()).map(sync).collect());
        }
        let settings = kiln_group::Config {
            deadline: config.deadline,
            shards: Some(shards),
            threads: kiln_tensor::threads(),
            ..Default::default()
        };
        start(&Group::local(models.len(), settings)?, models, true, config)
    }
}

/// The device of a model's first parameter.
fn device(model: &dyn Module) -> Option<Device> {
    let mut device = None;
    model.visit("", &mut |_, p| device = device.take().or_else(|| Some(p.device())));
    device
}

/// Gives all copies the parameters of the first, from device to device.
fn copy(models: &mut [&mut dyn Module]) -> Result<(), Error> {
    let Some((first, others)) = models.split_first_mut() else { return Ok(()) };
    let list = describe(&**first);
    let values = first.distinct();
    for (i, model) in others.iter_mut().enumerate() {
        same(&list, &describe(&**model), i + 1)?;
        let mut values = values.iter();
        let mut failed = None;
        model.replace(&mut |_, parameter| match values.next()?.1.detach().to_device(&parameter.device()) {
            Ok(value) => Some(like(parameter, value)),
            Err(error) => {
                failed.get_or_insert(error);
                None
            }
        });
        if let Some(error) = failed {
            return Err(error.into());
        }
        let mut buffers = first.buffers().into_iter();
        let mut failed = Ok(());
        model.visit_buffers("", &mut |_, buffer| {
            let Some((_, value)) = buffers.next() else { return };
            match value.to_device(&buffer.get().device()) {
                Ok(value) => buffer.load(value),
                Err(error) => failed = Err(error),
            }
        });
        failed?;
    }
    Ok(())
}

/// A value for a parameter's place, frozen or not as that was.
fn like(parameter: &Tensor, value: Tensor) -> Tensor {
    if parameter.is_leaf() { value.requires_grad() } else { value }
}

/// Starts for one or several ranks of this thread. Each exchange is begun for all before one is waited for.
fn start(
    groups: &[Group],
    models: &mut [&mut dyn Module],
    together: bool,
    config: Config,
) -> Result<Vec<GradientSync>, Error> {
    let mut own = Vec::new();
    for group in groups {
        let claim = group.claim(&config.name)?;
        let all: Vec<usize> = (0..group.ranks()).collect();
        own.push((group.subgroup(&config.name, &all, Some(group.layout().shards()))?, claim));
    }
    let texts: Vec<String> = models.iter().map(|m| describe(&**m)).collect();
    let lengths = texts.iter().map(|text| (text.len() as u64).to_le_bytes().to_vec());
    let lengths = from_first(&own, lengths.collect())?;
    let length = lengths.first().map_or(0, |l| l.iter().rev().fold(0, |n, &b| n << 8 | b as usize));
    let padded = texts.iter().map(|text| {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(length, 0);
        bytes
    });
    let first = from_first(&own, padded.collect())?;
    for ((group, _), (text, first)) in own.iter().zip(texts.iter().zip(&first)) {
        if let Err(error) = same(&String::from_utf8_lossy(first), text, group.rank()) {
            // The others wait for this rank: they learn why it does not come.
            group.abort(&error.to_string());
            return Err(error);
        }
    }
    let mut contents = Vec::new();
    for model in models.iter() {
        let all = model.distinct().into_iter().chain(model.buffers());
        let reads: Vec<_> = all.map(|(_, p)| p.content()).collect();
        contents.push(reads.into_iter().map(|read| read.wait()).collect::<Result<Vec<Data>, _>>()?);
    }
    let count = contents.iter().map(Vec::len).min().unwrap_or(0);
    let mut fresh: Vec<Vec<Vec<u8>>> = vec![Vec::new(); own.len()];
    for i in 0..count {
        let bytes = contents.iter().map(|list| list[i].bytes.to_vec()).collect();
        from_first(&own, bytes)?.into_iter().zip(&mut fresh).for_each(|(value, list)| list.push(value));
    }
    for ((model, fresh), before) in models.iter_mut().zip(fresh).zip(&contents) {
        let mut values = fresh.into_iter().zip(before);
        model.replace(&mut |_, parameter| {
            let (bytes, before) = values.next()?;
            let data = Data::new(before.meta, Bytes::new(bytes));
            let fresh = || like(parameter, Tensor::from_data(data.clone(), &parameter.device()));
            (data.bytes[..] != before.bytes[..]).then(fresh)
        });
        model.visit_buffers("", &mut |_, buffer| {
            let Some((bytes, before)) = values.next() else { return };
            let data = Data::new(before.meta, Bytes::new(bytes));
            if data.bytes[..] != before.bytes[..] {
                buffer.load(Tensor::from_data(data, &buffer.get().device()));
            }
        });
    }
    let sync = |(group, claim): (Group, _)| {
        let (layout, rank) = (group.layout(), group.rank());
        GradientSync::new(config.clone(), layout, rank, Way::Ranks(group), together, Some(claim))
    };
    Ok(own.into_iter().map(sync).collect())
}

/// What rank 0 has, on every rank.
fn from_first<C>(groups: &[(Group, C)], own: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, Error> {
    let pending: Vec<Pending> =
        groups.iter().zip(&own).map(|((group, _), own)| spread(group, own)).collect::<Result<_, _>>()?;
    Ok(pending.into_iter().map(|p| p.wait().map(|b| b.to_vec())).collect::<Result<_, _>>()?)
}

/// Begins to give everyone what rank 0 has.
pub(super) fn spread(group: &Group, own: &[u8]) -> Result<Pending, kiln_group::Error> {
    group.start(Call::new(Op::Broadcast(0), DType::U8), group.buffer_of(own)?)
}

/// All parameters and buffers, a line each. Tied weights must be tied on all ranks.
fn describe(model: &dyn Module) -> String {
    let (mut text, mut firsts) = (String::new(), HashMap::new());
    model.visit("", &mut |path, p| {
        let frozen = if p.is_leaf() { "" } else { " frozen" };
        let first: &mut String = firsts.entry(p.identity()).or_insert_with(|| path.to_string());
        let tied = if first == path { String::new() } else { format!(" tied to {first}") };
        text.push_str(&format!("{path} {}{frozen}{tied}\n", p.meta()));
    });
    model.visit_buffers("", &mut |path, buffer| {
        text.push_str(&format!("{path} {} buffer\n", buffer.get().meta()));
    });
    text
}

/// Whether a rank has the parameters of rank 0; if not, what differs first.
fn same(first: &str, own: &str, rank: usize) -> Result<(), Error> {
    if first == own {
        return Ok(());
    }
    let (mut first, mut own) = (first.lines(), own.lines());
    loop {
        let (want, got) = (first.next(), own.next());
        if want != got || want.is_none() {
            let line = |l: Option<&str>| l.unwrap_or("nothing").to_string();
            return Err(Error::Parameters { rank, want: line(want), got: line(got) });
        }
    }
}
